"""The cost model as the time of a simulated step."""

from collections.abc import Mapping

from crossdock.core import ModelSpec
from crossdock.planner.calibration import DEFAULT, Calibration
from crossdock.planner.cost import StepModel
from crossdock.planner.hardware import Hardware
from crossdock.planner.layout import Layout, Phase
from crossdock.planner.simulate.config import StepLoad

SLOPE_TOKENS = 4096.0
"""Where the cost of one more token is read off: products are at their full rate by then."""
SPREAD_OUT = ("experts", "dispatch", "combine")
"""Parts that all ranks share; the others are a group's own."""


class PricedSteps:
    """A `StepTime`: seconds by `planner.cost`.

    The binding group is the one whose own parts take longest. Experts see the mean of all ranks'
    tokens, times the imbalance; exchanges take what the fuller of sender and receiver takes. Chunks
    and decodes of one step share its products; their attention adds up.
    """

    def __init__(self, spec: ModelSpec, hardware: Hardware, calibration: Calibration = DEFAULT):
        self._spec, self._hardware, self._calibration = spec, hardware, calibration
        self._layouts: dict[Layout, _LayoutSteps] = {}

    def __call__(self, layout: Layout, load: StepLoad) -> float:
        steps = self._layouts.get(layout)
        if steps is None:
            steps = self._layouts[layout] = _LayoutSteps(
                self._model(layout, "prefill"), self._model(layout, "decode")
            )
        return steps.seconds(load)

    def _model(self, layout: Layout, phase: Phase) -> StepModel:
        return StepModel(self._spec, self._hardware, layout, phase, self._calibration)


class _LayoutSteps:
    def __init__(self, prefill: StepModel, decode: StepModel):
        self._prefill, self._decode = prefill, decode
        layers = prefill.spec.num_layers
        self._pair_s = layers * max(prefill.kv_flop_s, prefill.kv_read_s)
        self._kv_s = layers * max(decode.kv_flop_s, decode.kv_read_s)
        once, twice = (_own(prefill.parts(n * SLOPE_TOKENS, 0.0, 1.0)) for n in (1, 2))
        self._token_s = (twice - once) / SLOPE_TOKENS

    def seconds(self, load: StepLoad) -> float:
        layout = self._decode.layout
        tokens_G = load.tokens_G
        own_G = self._token_s * tokens_G + self._kv_s * load.kv_G + self._pair_s * load.pairs_G
        g = int(own_G.argmax())
        halves = 2 if layout.overlap == "tbo" else 1
        per_gpu = layout.tp * halves
        parts = self._group_parts(load, g, per_gpu)
        mean = load.total_tokens / layout.gpus / halves
        fullest = float(tokens_G.max()) / per_gpu
        shared = self._decode.parts(mean, 0.0, load.imbalance)
        sent = self._decode.parts(fullest, 0.0, 1.0)
        parts["experts"] = shared["experts"]
        for name in ("dispatch", "combine"):
            parts[name] = max(shared[name], sent[name])
        parts = {name: halves * seconds for name, seconds in parts.items()}
        overhead = self._decode.calibration.step_overhead_s
        return sum(parts.values()) - self._decode.hidden(parts) + overhead

    def _group_parts(self, load: StepLoad, g: int, per_gpu: int) -> dict[str, float]:
        """Of `1 / per_gpu` of group g's tokens."""
        decodes, chunk = (float(x[g]) / per_gpu for x in (load.decodes_G, load.prefill_G))
        parts = self._decode.parts(decodes + chunk, 0.0, 1.0)
        parts["attention_kv"] = parts["lm_head"] = 0.0
        for model, tokens, attended_G in (
            (self._decode, decodes, load.kv_G),
            (self._prefill, chunk, load.pairs_G),
        ):
            if tokens:
                own = model.parts(tokens, float(attended_G[g]) / per_gpu / tokens, 1.0)
                parts["attention_kv"] += own["attention_kv"]
                parts["lm_head"] += own["lm_head"]
        return parts


def _own(parts: Mapping[str, float]) -> float:
    return sum(seconds for name, seconds in parts.items() if name not in SPREAD_OUT)
