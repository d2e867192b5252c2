"""The questions to settle before a deployment, answered with the plan's numbers."""

from dataclasses import dataclass
from typing import Literal

from crossdock.planner.answer import Answer
from crossdock.planner.answer_document import largest_part
from crossdock.planner.memory import expert_bytes, kv_bytes_per_token
from crossdock.planner.observed import Observed
from crossdock.planner.search_deployment import FULL, Side
from crossdock.planner.search_points import steady_sequences

Verdict = Literal["good", "look", "bad"]
GB = 1e9
BOTTLENECK = 0.4
"""Share of a step above which its largest part is called the bottleneck."""
COOLDOWN_MOVES, COOLDOWN_REQUESTS = 3, 3
"""After a change of size: times that moving a GPU's experts takes, and lifetimes of a request, so
that the next decision sees what the last one did. The longer counts."""


@dataclass(frozen=True)
class Item:
    question: str
    answer: str
    verdict: Verdict


def checklist(answer: Answer, observed: Observed | None = None) -> list[Item]:
    """`observed`: what a running server's metrics say, where one was asked."""
    return [
        _experts(answer),
        _fabric(answer),
        _kv(answer),
        _balance(answer, observed),
        _scaling(answer),
        _fp8_kv(answer),
        _all_to_all(answer, observed),
    ]


def _experts(answer: Answer) -> Item:
    q, smallest = answer.question, answer.smallest
    fits = "none" if smallest.ranks is None else f"EP{smallest.ranks}"
    if smallest.even not in (None, smallest.ranks):
        fits += f", EP{smallest.even} if all ranks are to hold as many"
    sides = (("prefill", answer.best.prefill), ("decode", answer.best.decode))
    planned = ", ".join(f"EP{side.point.layout.gpus} {role}" for role, side in sides)
    text = (
        f"{q.spec.moe.num_experts} experts, top-{q.spec.moe.top_k}, {len(q.spec.moe_layers)} MoE "
        f"layers; smallest EP that fits {q.hardware.name}: {fits}; planned: {planned}"
    )
    return Item("How many experts, and the smallest EP", text, "good")


def _fabric(answer: Answer) -> Item:
    """What prefill's exchanges would have to reach to hide behind the rest of the step."""
    q, side = answer.question, answer.best.prefill
    step, layout = side.point.step, side.point.layout
    sent = step.parts.get("dispatch", 0.0) + step.parts.get("combine", 0.0)
    if sent == 0.0:
        return Item("Fabric against need", "no exchange between GPUs is needed", "good")
    hardware = q.hardware
    crosses = layout.gpus > hardware.domain_size and hardware.outer is not None
    link = hardware.outer if crosses and hardware.outer is not None else hardware.inner
    rest = sum(step.parts.values()) - sent
    needed = link.bytes_per_s * sent / rest
    exposed = step.exposed_communication / step.total
    text = (
        f"{link.name}: {link.bytes_per_s / GB:.0f} GB/s per GPU and direction; prefill exchanges "
        f"take {sent * 1e3:,.0f} ms beside {rest * 1e3:,.0f} ms of other work: {needed / GB:.0f} "
        f"GB/s would hide them; {exposed:.0%} of the step is communication not hidden"
    )
    return Item("Fabric against need", text, _verdict(exposed, 0.15, BOTTLENECK))


def _kv(answer: Answer) -> Item:
    memory, side = answer.memory["decode"], answer.best.decode
    groups = side.gpus // side.point.layout.tp
    needed = side.point.batch * side.point.layout.tp
    steady = max(1, steady_sequences(memory.requests))
    text = (
        f"{memory.kv_bytes / GB:.1f} GB per GPU, {memory.kv_tokens:,} tokens per attention group: "
        f"{memory.requests:,} requests of {memory.length:,}; {needed:,.0f} run at the planned load "
        f"({needed / steady:.0%} of the {steady:,} that leave room for chance), "
        f"{needed * groups:,.0f} of {memory.requests * groups:,} in all groups"
    )
    return Item("KV budget against target", text, _verdict(needed / steady, 0.9, 1.0))


def _balance(answer: Answer, observed: Observed | None) -> Item:
    side = answer.best.prefill
    planned = answer.pricing.imbalance(side.point.layout, side.point.batch)
    text = f"planned for a busiest rank at {planned:.2f} times the mean after balancing"
    if observed is None:
        text += "; crossdock exports it (crossdock:expert_load_*), give --from URL to compare"
        return Item("Is balance monitored", text, "look")
    if observed.imbalance is None:
        return Item("Is balance monitored", f"{text}; the server has served nothing yet", "look")
    text += f"; measured there: {observed.imbalance:.2f}"
    return Item("Is balance monitored", text, _verdict(observed.imbalance / planned, 1.1, 1.5))


def _scaling(answer: Answer) -> Item:
    best, q = answer.best, answer.question
    side = best.prefill if best.prefill.load >= best.decode.load else best.decode
    capacity = best.capacity / side.instances
    moved = (
        side.point.layout.redundant_per_rank + -(-q.spec.moe.num_experts // side.point.layout.gpus)
    ) * expert_bytes(q.spec, q.formats.weights_dtype)
    link = q.hardware.outer or q.hardware.inner
    seconds = moved / link.bytes_per_s
    lifetime = best.ttft_s + q.work.osl * best.tpot_s
    cooldown = max(COOLDOWN_MOVES * seconds, COOLDOWN_REQUESTS * lifetime)
    text = (
        f"an instance carries {capacity:.3g} requests/s: add one above {FULL * capacity:.3g} per "
        f"instance ({FULL:.0%}), remove one below {FULL * capacity / 2:.3g}; a new size moves "
        f"up to {moved / GB:.0f} GB of experts per GPU, {seconds:.1f} s at "
        f"{link.bytes_per_s / GB:.0f} GB/s: cool down {cooldown:.0f} s or more, "
        f"{COOLDOWN_REQUESTS} lifetimes of a request or {COOLDOWN_MOVES} moves"
    )
    return Item("Scaling thresholds and cooldown", text, "good")


def _fp8_kv(answer: Answer) -> Item:
    q, side = answer.question, answer.best.decode
    now = kv_bytes_per_token(q.spec, q.formats.kv_dtype, side.point.layout.tp)
    fp8 = kv_bytes_per_token(q.spec, "float8_e4m3fn", side.point.layout.tp)
    if q.formats.kv_dtype.startswith("float8"):
        return Item("FP8 KV", f"planned: {fp8:,} bytes per token", "good")
    bound = "KV memory" in side.bound
    text = (
        f"planned in {q.formats.kv_dtype}, {now:,} bytes per token; FP8 takes {fp8:,}, room for "
        f"{now / fp8:.1f} times the requests; KV memory "
        + ("is what bounds decode's batch: try --kv-dtype fp8" if bound else "does not bind here")
    )
    return Item("FP8 KV", text, "look" if bound else "good")


def _all_to_all(answer: Answer, observed: Observed | None) -> Item:
    side: Side = answer.best.decode
    name, largest = largest_part(side.point)
    share = max(0.0, side.point.step.exposed_communication) / side.point.step.total
    verdict = _verdict(share, BOTTLENECK / 2, BOTTLENECK)
    text = (
        f"predicted: dispatch and combine, not hidden, {share:.0%} of a decode step; largest part "
        f"{name}, {largest:.0%}"
    )
    if observed is not None:
        text += f"; measured on the server: {observed.exchange_share:.0%} of its steps"
    return Item("Is the all-to-all the decode bottleneck", text, verdict)


def _verdict(value: float, good: float, bad: float) -> Verdict:
    return "good" if value <= good else "look" if value <= bad else "bad"
