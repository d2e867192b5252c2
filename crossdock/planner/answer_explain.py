"""Each formula of an answer with its numbers in it."""

import numpy as np

from crossdock.planner.alignment import advise_dense, aligned_tp_sizes, shards
from crossdock.planner.answer import Answer, tie
from crossdock.planner.answer_document import Rates, rate_text, usd_text
from crossdock.planner.cost import communication_table, speed_limit
from crossdock.planner.cost.model import FP8_ROW
from crossdock.planner.facts import model_facts
from crossdock.planner.fragmentation import best_page_size, fragmentation, lifetime
from crossdock.planner.search_deployment import FULL, Side
from crossdock.planner.search_points import (
    HALF_A_STEP,
    mean_decode_context,
    mean_prefill_context,
    steady_sequences,
)

GB = 1e9
PAGES = (16, 64)
DECODE_GRAPHS = 3
"""k of the published formula for the memory of dense layers: buffers of decode graphs."""
SIZES = (8, 16, 32, 64, 128)


def explain(answer: Answer, lengths: np.ndarray | None = None) -> dict[str, list[str]]:
    """Lines by title, in the order of the argument. `lengths`: tokens that requests hold, a sample;
    None: those of one request from its prompt to its end."""
    q, best = answer.question, answer.best
    facts = model_facts(q.spec, q.work.isl, q.formats.weights_dtype, q.formats.kv_dtype)
    return {
        "Model": facts.lines(),
        "Smallest EP": list(answer.smallest.lines),
        **_memory(answer),
        "Prefill step": _step(best.prefill, answer, mean_prefill_context(q.work.isl)),
        "Decode step": _step(best.decode, answer, mean_decode_context(q.work)),
        "From steps to requests": _rates(answer),
        "Imbalance": _imbalance(answer),
        "Communication of one MoE layer per GPU, EP beside TP": _communication(answer),
        "Tensor-parallel shards": _shards(answer),
        **_dense(answer),
        "KV pages": _pages(answer, lengths),
        "Choice": _choice(answer),
    }


def _memory(answer: Answer) -> dict[str, list[str]]:
    if answer.best.kind == "together":
        return {"Memory of one GPU": answer.memory["decode"].lines()}
    return {f"Memory of one GPU, {role}": plan.lines() for role, plan in answer.memory.items()}


def _step(side: Side, answer: Answer, context: float) -> list[str]:
    step = side.point.step
    lines = list(step.explain)
    launches = step.parts.get("uncaptured_launches")
    if launches:
        lines.append(f"uncaptured_launches = {launches * 1e3:,.3f} ms more, as no graph holds it")
    return lines


def _rates(answer: Answer) -> list[str]:
    q, best, work = answer.question, answer.best, answer.question.work
    p, d = best.prefill, best.decode
    rates = Rates(best, q)
    lines = [
        f"prefill: {p.point.batch:,.0f} tokens / {p.point.step.total:.4f} s / {work.isl:,} = "
        f"{rate_text(p.point.requests_per_gpu_s)} requests/s per GPU, x {p.gpus} GPUs = "
        f"{rate_text(p.point.requests_per_gpu_s * p.gpus)}",
        f"decode: {d.point.batch:,.3g} sequences / {d.point.step.total:.4f} s / {work.osl:,} "
        f"= {rate_text(d.point.requests_per_gpu_s)} requests/s per GPU, x {d.gpus} GPUs = "
        f"{rate_text(d.point.requests_per_gpu_s * d.gpus)}",
    ]
    steps = max(1.0, work.isl / (p.point.batch * p.point.layout.tp))
    if best.kind == "split":
        rest = best.ttft_s - p.point.latency_s
        lines += [
            "capacity: the smaller of both roles at full load = "
            f"{rate_text(best.capacity)} requests/s",
            f"TTFT = ({steps:.2g} step{'s' * (steps > 1)} + {HALF_A_STEP} of waiting) x "
            f"{p.point.step.total * 1e3:,.1f} ms + {rest * 1e3:,.1f} ms of KV transfer, queue "
            f"= {best.ttft_s * 1e3:,.1f} ms",
            f"TPOT = one decode step = {best.tpot_s * 1e3:,.1f} ms",
        ]
    else:
        inserted = d.point.batch * work.isl * p.point.step.total / p.point.batch / work.osl
        lines += [
            f"TPOT = {d.point.step.total * 1e3:,.1f} ms + prefill of the sequences' successors, "
            f"{d.point.batch:,.3g} x {work.isl:,} tokens x {p.point.step.total * 1e3:,.1f} ms / "
            f"{p.point.batch:,.0f} tokens / {work.osl:,} = {inserted * 1e3:,.1f} ms: "
            f"{best.tpot_s * 1e3:,.1f} ms",
            f"capacity = {best.gpus} GPUs x {d.point.batch:,.3g} sequences / {work.osl:,} / "
            f"{best.tpot_s:.4f} s = {rate_text(best.capacity)} requests/s",
            f"TTFT = {best.ttft_s * 1e3:,.1f} ms: {steps:.2g} prefill step{'s' * (steps > 1)}, "
            f"{HALF_A_STEP} of one and a decode step of waiting, and the queue",
        ]
    if work.request_rate is not None:
        lines.append(
            f"load: {best.rate:,.4g} of {best.capacity:,.4g} requests/s; at most {FULL:.0%}, where "
            "an M/D/1 queue waits 4.5 services"
        )
    lines.append(
        f"per GPU: {rate_text(best.rate)} x {work.osl:,} / {best.gpus} = "
        f"{rate_text(rates.output_per_gpu)} output and {rate_text(rates.input_per_gpu)} input "
        f"tokens/s; per user 1 / TPOT = {rate_text(1 / best.tpot_s)}"
    )
    if rates.usd_per_million_output is not None:
        lines.append(
            f"cost: ${q.price:g} / 3600 s / {rate_text(rates.output_per_gpu)} tokens/s x 1e6 = "
            f"{usd_text(rates.usd_per_million_output)} per million output tokens"
        )
    held = answer.memory["decode"].requests
    lines.append(
        f"room for chance: an attention group holds {held:,} requests; n + 2 sqrt(n) <= {held:,} "
        f"gives n = {steady_sequences(held):,}"
    )
    return lines


def _imbalance(answer: Answer) -> list[str]:
    lines = []
    for name, side in (("prefill", answer.best.prefill), ("decode", answer.best.decode)):
        layout, batch = side.point.layout, side.point.batch
        value = answer.pricing.imbalance(layout, batch)
        lines.append(
            f"{name}: EP{layout.gpus} with {layout.redundant_per_rank} redundant per rank, EPLB on "
            f"Zipf loads of exponent {answer.question.work.zipf:g}, with drift and chance: busiest "
            f"rank {value:.2f} times the mean, balancedness {1 / value:.2f}"
        )
    return lines


def _communication(answer: Answer) -> list[str]:
    """At the batch of each role; under EP a token's rows grow no further than top-k, under TP every
    GPU sums the rows of all: a ring moves 2 (N - 1) / N of them."""
    q, lines = answer.question, []
    for role, side in (("prefill", answer.best.prefill), ("decode", answer.best.decode)):
        most = q.hardware.domain_size if q.hardware.outer is None else max(SIZES)
        narrow = q.formats.weights_dtype.startswith("float8")
        table = communication_table(
            q.spec,
            q.hardware,
            [size for size in SIZES if size <= most],
            tokens_per_gpu=side.point.batch,
            mode=side.point.layout.mode,
            dispatch_row_bytes=q.spec.hidden_size * (FP8_ROW if narrow else 2.0),
        )
        lines += [
            f"{role}, {row.gpus} GPUs: EP {row.ep_inner_bytes / 1e6:,.1f} MB inside and "
            f"{row.ep_outer_bytes / 1e6:,.1f} MB outside, {row.ep_s * 1e3:,.3f} ms; TP 2 ("
            f"{row.gpus} - 1) / {row.gpus} x {side.point.batch * row.gpus:,.0f} tokens = "
            f"{row.tp_bytes / 1e6:,.1f} MB, {row.tp_s * 1e3:,.3f} ms"
            for row in table
        ]
    link = q.hardware.outer or q.hardware.inner
    limit = speed_limit(link.bytes_per_s)
    return [
        *lines,
        f"published bound for DeepSeek-V3 (arXiv 2505.09343) at {link.bytes_per_s / GB:.0f} GB/s: "
        f"(1 + 2) B x 32 tokens x 9 x 7,000 / {link.bytes_per_s / GB:.0f} GB/s = "
        f"{limit.exchange_s * 1e6:.2f} us a layer, x 2 x 61 = {limit.token_s * 1e3:.2f} ms a token",
    ]


def _shards(answer: Answer) -> list[str]:
    q = answer.question
    dtype = q.formats.weights_dtype
    fitting = ", ".join(map(str, aligned_tp_sizes(q.spec, dtype, "tp")))
    lines = [f"TP sizes that need no padding, experts by TP: {fitting}"]
    width = answer.tensor_parallel.decode.point.layout.tp if answer.tensor_parallel else 8
    return lines + [shard.line() for shard in shards(q.spec, width, dtype, "tp")]


def _dense(answer: Answer) -> dict[str, list[str]]:
    """Tensor against data parallelism of the dense layers, by role."""
    q = answer.question
    if len(q.spec.moe_layers) == q.spec.num_layers:
        return {}
    sides = (("prefill", answer.best.prefill, 0), ("decode", answer.best.decode, DECODE_GRAPHS))
    return {
        f"Dense layers, {role}": list(
            advise_dense(
                q.spec,
                side.point.layout.gpus,
                max(1, round(side.point.batch)),
                graphs=graphs,
                weights_dtype=q.formats.weights_dtype,
            ).lines
        )
        for role, side, graphs in sides
    }


def _pages(answer: Answer, lengths: np.ndarray | None) -> list[str]:
    work = answer.question.work
    held = lifetime(work.isl, work.osl) if lengths is None else lengths
    lines = []
    for size in PAGES:
        f = fragmentation(held, size)
        lines.append(
            f"pages of {size}: {f.tokens:.1f} tokens of rounding per request, {f.expected:.2%} "
            f"expected, {f.p99:.2%} at p99; reserved over used {f.reserved_over_used:.4f}"
        )
    return [*lines, f"largest page that wastes at most 1%: {best_page_size(held).page_size}"]


def _choice(answer: Answer) -> list[str]:
    return [
        f"{answer.found.priced:,} points of {len(answer.found.prefill)} prefill and "
        f"{len(answer.found.decode)} decode layouts; {len(answer.found.ranked)} deployments kept",
        f"two predictions differ by chance by sqrt(2) / 0.67 x median error = {tie():.0%}: within "
        "that of the fastest, layouts whose weights leave a third of the memory come first, then "
        "those with more tokens/s per user",
    ]
