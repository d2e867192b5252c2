"""What a running crossdock server's `/metrics` say about the questions that a plan answers."""

import re
from dataclasses import dataclass

from crossdock.core import ConfigError
from crossdock.planner.answer_document import number_text
from crossdock.planner.fragmentation import KVState, kv_state

_SAMPLE = re.compile(r"^crossdock:(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Observed:
    """`exchange_share`: of step time in dispatch and combine, waits included, since the start;
    `imbalance`: of the ranks' expert load, mean over layers (None: nothing served yet);
    tokens per second and device as the server's last window has them."""

    kv: KVState
    exchange_share: float
    imbalance: float | None
    input_tokens_per_s_per_gpu: float
    output_tokens_per_s_per_gpu: float

    def lines(self) -> list[str]:
        uneven = "nothing served yet" if self.imbalance is None else f"{self.imbalance:.2f}"
        return [
            *self.kv.lines(),
            f"dispatch and combine: {self.exchange_share:.0%} of step time, waits included",
            f"busiest rank over the mean: {uneven}",
            f"per device now: {number_text(self.input_tokens_per_s_per_gpu)} input and "
            f"{number_text(self.output_tokens_per_s_per_gpu)} output tokens/s",
        ]


def observed(exposition: str) -> Observed:
    """From the text of `/metrics`.

    Raises:
        ConfigError: it is not that of a crossdock server.
    """
    samples = _samples(exposition)
    kv = kv_state(exposition)
    parts = {
        labels["part"]: value for name, labels, value in samples if name == "step_seconds_total"
    }
    plain = {name: value for name, labels, value in samples if not labels}
    even = [value for name, _, value in samples if name == "expert_balancedness" and value > 0]
    step = parts.get("step") or sum(v for part, v in parts.items() if part != "wait")
    sent = parts.get("dispatch", 0.0) + parts.get("combine", 0.0)
    return Observed(
        kv=kv,
        exchange_share=sent / step if step else 0.0,
        imbalance=sum(1 / value for value in even) / len(even) if even else None,
        input_tokens_per_s_per_gpu=plain.get("prefill_tpgs", 0.0),
        output_tokens_per_s_per_gpu=plain.get("decode_tpgs", 0.0),
    )


def _samples(exposition: str) -> list[tuple[str, dict[str, str], float]]:
    found = [
        (name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))
        for name, labels, value in _SAMPLE.findall(exposition)
    ]
    if not found:
        raise ConfigError("no crossdock metrics in the answer; expected a crossdock server")
    return found
