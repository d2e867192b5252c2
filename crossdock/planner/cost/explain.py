"""The formulas of a step with their numbers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossdock.planner.cost.model import StepModel


def explain(model: "StepModel", tokens: float, context: float, imbalance: float) -> tuple[str, ...]:
    """Lines in the order of a layer; with two-batch overlap, of one half, which runs twice."""
    halves = 2 if model.layout.overlap == "tbo" else 1
    t = tokens / halves
    parts = model.parts(t, context, imbalance)
    rows, padded, active = model.expert_rows(t, imbalance)
    sampled = t if model.phase == "decode" else t / max(2.0 * context, 1.0)
    lines = [
        f"{t:,.1f} tokens per GPU, {context:,.0f} of context, imbalance {imbalance:.2f}"
        + (" (each of two halves)" if halves == 2 else ""),
        model.projections.line(t),
        _attention(model, t, min(context, model.window), parts["attention_kv"]),
        model.router.line(t),
        _exchange(model, "dispatch", model.dispatch_row, t, imbalance, parts),
        f"{model.experts.line(rows, padded, active)}; {model.slots} slots, {active:.0%} in use, "
        f"{rows:,.0f} rows",
        _exchange(model, "combine", model.combine_row, t, imbalance, parts),
        model.shared.line(t),
        model.dense.line(t),
        model.head.line(sampled),
        _all_reduce(model, t, parts["all_reduce"]),
        f"small_kernels = {model.spec.num_layers} layers x "
        f"({model.calibration.layer_overhead_s * 1e6:.0f} us + {t:,.0f} tokens x "
        f"{model.elementwise_s / model.spec.num_layers * 1e9:,.1f} ns) = "
        f"{parts['small_kernels'] * 1e3:,.3f} ms",
    ]
    cost = model.cost(tokens, context, imbalance)
    lines.append(
        f"step = {'2 x ' if halves == 2 else ''}{sum(parts.values()) * 1e3:,.3f} ms - "
        f"{cost.hidden * 1e3:,.3f} ms hidden ({model.layout.overlap}) + "
        f"{cost.parts['step'] * 1e3:,.1f} ms between steps = {cost.total * 1e3:,.3f} ms; "
        f"communication exposed {cost.exposed_communication * 1e3:,.3f} of "
        f"{cost.communication * 1e3:,.3f} ms"
    )
    return tuple(lines)


def _attention(model: "StepModel", tokens: float, context: float, seconds: float) -> str:
    return (
        f"attention_kv = {model.spec.num_layers} x roof({tokens:,.0f} x {context:,.0f} x "
        f"{model.kv_flop_s * 1e12:,.2f} ps of arithmetic, x {model.kv_read_s * 1e12:,.2f} ps of "
        f"reading) = {seconds * 1e3:,.3f} ms"
    )


def _exchange(
    model: "StepModel",
    name: str,
    row_bytes: float,
    tokens: float,
    imbalance: float,
    parts: dict[str, float],
) -> str:
    rows, hardware = model.spread, model.hardware
    if rows.ranks == 1:
        return f"{name} = 0: one rank"
    inside = f"{rows.inner:.2f} rows / {hardware.inner.bytes_per_s / 1e9:,.0f} GB/s inside"
    if rows.staged:
        inside += (
            f" (or {rows.staged:.2f} staged, own ones too, at "
            f"{model.calibration.normal_efficiency:.0%} of it)"
        )
    text = (
        f"{name} = {len(model.spec.moe_layers)} x ({tokens:,.0f} tokens x {row_bytes:,.0f} B x "
        f"{imbalance:.2f} x {inside}"
    )
    if rows.nodes > 1 and hardware.outer is not None:
        text += f", x {rows.outer:.2f} rows / {hardware.outer.bytes_per_s / 1e9:,.0f} GB/s outside"
    return f"{text}; the slowest, and latency) = {parts[name] * 1e3:,.3f} ms"


def _all_reduce(model: "StepModel", tokens: float, seconds: float) -> str:
    tp = model.layout.tp
    if not seconds:
        return "all_reduce = 0: no tensor parallelism"
    return (
        f"all_reduce = {model.spec.num_layers} layers x {model.reduces_per_layer} x "
        f"2({tp}-1)/{tp} x {tokens * tp:,.0f} tokens x {model.combine_row:,.0f} B = "
        f"{seconds * 1e3:,.3f} ms"
    )
