"""Why nothing serves a workload: which number is short, and by how much."""

from collections.abc import Sequence

from crossdock.core import CapacityError
from crossdock.planner.layout import Layout, Workload
from crossdock.planner.search_deployment import name_of
from crossdock.planner.search_points import Curve, Fit
from crossdock.planner.search_space import ANY_NUMBER

GIB = 2**30


def require_fit(
    made: dict[str, list[Curve]], unfit: Sequence[tuple[Layout, Fit]], work: Workload, gpus: int
) -> None:
    for role, curves in made.items():
        if curves:
            continue
        tried = [(layout, fit) for layout, fit in unfit if layout.role == role]
        short = [(fit.short_bytes, layout) for layout, fit in tried if fit.short_bytes]
        if tried and len(short) == len(tried):
            least, layout = min(short, key=lambda pair: pair[0])
            largest = max(layout.gpus for layout, _ in tried)
            raise CapacityError(
                f"memory is short by {least / GIB:.1f} GiB per GPU for {role}, at best "
                f"({name_of(layout)}, {layout.weights_dtype} weights): raise --gpus"
                f"{given(gpus, largest)}, or take GPUs with more memory"
            )
        if tried:
            most, layout = max(
                ((fit.kv_tokens, layout) for layout, fit in tried), key=lambda pair: pair[0]
            )
            needed = work.isl + work.osl
            raise CapacityError(
                f"KV memory holds {most:,} tokens per attention group for {role} at best "
                f"({name_of(layout)}), a request needs {needed:,}: short by "
                f"{max(0, needed - most):,} tokens; raise --gpus{given(gpus, gpus)}, shorten --isl "
                "or --osl, or store KV in fewer bytes (--kv-dtype)"
            )
        raise CapacityError(f"no layout of {gpus} GPUs is allowed for {role}")


def why_none(
    made: dict[str, list[Curve]], work: Workload, gpus: int, split: bool, held: bool
) -> str:
    """Which limit no layout meets, and by how much the nearest misses it. `held`: whether the GPUs
    have room for both phases."""
    parts = []
    for role, limit_s, name in (
        ("prefill", work.ttft_s, "TTFT"),
        ("decode", work.tpot_s, "TPOT"),
    ):
        nearest = min((p for c in made[role] for p in c.points), key=lambda p: p.latency_s)
        if limit_s is not None and nearest.latency_s > limit_s:
            parts.append(
                f"{name} {limit_s * 1e3:,.1f} ms is short by "
                f"{(nearest.latency_s - limit_s) * 1e3:,.1f} ms: the fastest layout "
                f"({name_of(nearest.layout)}, {nearest.batch * nearest.layout.tp:,.0f} "
                f"{'tokens a step' if role == 'prefill' else 'sequence'} per attention group) "
                f"takes {nearest.latency_s * 1e3:,.1f} ms; raise --{name.lower()}, or shorten --isl"
            )
    if parts:
        return "; ".join(parts)
    if not held:
        return (
            f"{gpus} GPUs have memory for prefill or for decode, not for both: raise --gpus, or "
            "take GPUs with more memory"
        )
    apart = (
        "prefill and decode side by side or together" if split else "both phases on one instance"
    )
    return (
        f"{gpus} GPUs serve {apart} within no combination of the limits: each is met alone, not "
        "both at once; raise --gpus, --ttft or --tpot"
    )


def given(gpus: int, largest: int) -> str:
    """`largest`: the largest instance that was looked at."""
    if gpus >= ANY_NUMBER:
        return ""
    of_them = f", of which an instance takes {largest:,}: whole nodes, or a part that divides one"
    return f" ({gpus:,} given{of_them if largest < gpus else ''})"
