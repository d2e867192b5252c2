"""Families of the experts' load."""

from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client.core import Metric

from crossdock.metrics.families import counter, gauge
from crossdock.metrics.totals import LoadWindow, balancedness, relative_std


def expert_families(
    expert_LE: np.ndarray | None, moe_layers: Sequence[int], window: LoadWindow
) -> Iterator[Metric]:
    """`expert_LE`: totals; `moe_layers`: their indices in the model."""
    layers = [str(layer) for layer in moe_layers]
    rows = [] if expert_LE is None else expert_LE.tolist()
    yield counter(
        "expert_tokens_total",
        "Tokens routed to each logical expert (one token counts top-k times); layer is the "
        "model's layer index.",
        ["layer", "expert"],
        [
            ((layer, str(expert)), count)
            for layer, row in zip(layers, rows, strict=False)
            for expert, count in enumerate(row)
        ],
    )
    over = "over the last closed window of crossdock:load_window_tokens (before: the open one)"
    for name, what, figures in (
        ("expert_load_std_dev", "Standard deviation of expert load over its mean",
         relative_std(window.shown_LE)),
        ("rank_load_std_dev", "Standard deviation of the ranks' expert load over its mean",
         relative_std(window.shown_LR)),
        ("expert_balancedness", "Mean over maximum of the ranks' expert load, 1 is even",
         balancedness(window.shown_LR)),
    ):  # fmt: skip
        pairs = zip(layers, figures, strict=False)
        samples = [((layer,), figure) for layer, figure in pairs if figure is not None]
        yield gauge(name, f"{what}, {over}.", ["layer"], samples)
    yield gauge(
        "idle_experts",
        f"Experts that no token was routed to, {over}.",
        ["layer"],
        [((layer,), (row == 0).sum()) for layer, row in zip(layers, window.shown_LE, strict=False)],
    )
    yield gauge(
        "load_window_tokens",
        "Tokens per layer after which a load window closes.",
        [],
        [((), window.tokens)],
    )
    yield gauge(
        "load_window_filled_tokens",
        "Tokens per layer in the open load window so far.",
        [],
        [((), window.filled)],
    )
    yield counter("load_windows_total", "Load windows closed so far.", [], [((), window.closed)])
