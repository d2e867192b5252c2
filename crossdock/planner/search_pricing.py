"""The search's prices: memory, step cost and imbalance, each worked out once and kept."""

from dataclasses import replace
from math import log, sqrt

from crossdock.balance import POLICIES
from crossdock.core import ModelSpec
from crossdock.planner.calibration import DEFAULT
from crossdock.planner.commands import missing_in_layout
from crossdock.planner.cost import StepCost, StepModel, expected_imbalance
from crossdock.planner.hardware import Hardware
from crossdock.planner.layout import Layout, Phase, Workload
from crossdock.planner.memory import MemoryPlan, plan_memory
from crossdock.planner.search_points import Fit

BALANCED_RANKS = 32
"""At which the balanced imbalance of real traffic is known; it grows with the logarithm of ranks,
as maxima do."""
UNCAPTURED_LAYER_S = 0.3e-3
"""Normal mode's receive sizes reach the host by a wait in every layer, so that no CUDA graph holds
its decode steps and launches cannot run ahead: some 35 of 8 us. A judgement, not a measurement."""


class CostPricing:
    """Implements `Pricing`. Experts are placed by EPLB for Zipf loads of `work.zipf`."""

    def __init__(self, spec: ModelSpec, hardware: Hardware, work: Workload):
        self._spec, self._hardware, self._work = spec, hardware, work
        self._fits: dict[Layout, Fit] = {}
        self._models: dict[tuple[Layout, Phase], StepModel] = {}
        self._skews: dict[tuple[int, int], float] = {}

    def fit(self, layout: Layout) -> Fit:
        key = replace(layout, overlap="off")
        if key not in self._fits:
            plan = self.memory(key)
            self._fits[key] = Fit(
                plan.kv_tokens, plan.short_bytes, plan.weights.total / plan.budget_bytes
            )
        return self._fits[key]

    def memory(self, layout: Layout) -> MemoryPlan:
        """As our engine holds it, the vocabulary whole, where it runs the layout; others split the
        vocabulary over `tp`."""
        ours = layout.tp > 1 and not missing_in_layout(layout, self._spec, self._hardware)
        return plan_memory(self._spec, self._hardware, layout, self._work, whole_vocab=ours)

    def step(self, layout: Layout, phase: Phase, tokens_per_gpu: float, context: float) -> StepCost:
        key = replace(layout, role="both", max_tokens_per_rank=1), phase
        if key not in self._models:
            self._models[key] = StepModel(self._spec, self._hardware, key[0], phase)
        cost = self._models[key].cost(
            tokens_per_gpu, context, self.imbalance(layout, tokens_per_gpu)
        )
        if phase == "prefill" or layout.mode != "normal" or _exchanges_nothing(layout):
            return cost
        halves = 2 if layout.overlap == "tbo" else 1
        launches = halves * len(self._spec.moe_layers) * UNCAPTURED_LAYER_S
        return replace(cost, parts={**cost.parts, "uncaptured_launches": launches})

    def imbalance(self, layout: Layout, tokens_per_gpu: float) -> float:
        """Rows of the busiest rank over the mean: skew left by the balancer, and chance."""
        if _exchanges_nothing(layout):
            return 1.0
        ranks = layout.gpus
        key = ranks, layout.redundant_per_rank
        if key not in self._skews:
            self._skews[key] = self._skew(*key)
        rows = tokens_per_gpu * self._spec.moe.top_k
        return min(self._skews[key] * (1 + sqrt(2 * log(ranks) / rows)), float(ranks))

    def _skew(self, ranks: int, redundant: int) -> float:
        """What EPLB leaves of these very loads, and what the next loads, which differ, add."""
        moe, zipf = self._spec.moe, self._work.zipf
        placed = expected_imbalance(
            moe, ranks, zipf=zipf, redundant_per_rank=redundant, policy=POLICIES["eplb"]
        )
        drift = (DEFAULT.real_traffic_imbalance - 1) * zipf / DEFAULT.real_traffic_zipf
        return placed + drift * log(ranks) / log(BALANCED_RANKS)


def _exchanges_nothing(layout: Layout) -> bool:
    return layout.experts == "tp" or layout.gpus == 1
