"""An answer for people."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from crossdock.planner.answer import Answer, Question
from crossdock.planner.answer_document import (
    Rates,
    commands,
    number_text,
    part_name,
    rate_text,
    tokens_per_gpu_s,
    usd_text,
    why,
)
from crossdock.planner.commands import Command, missing_here, redundant_experts
from crossdock.planner.facts import model_facts
from crossdock.planner.search_deployment import Deployment, Side
from crossdock.planner.search_points import Point

GB = 1e9


def render(answer: Answer) -> RenderableType:
    q = answer.question
    shown: list[RenderableType] = [
        _question(q),
        "",
        Text("Recommended", style="bold"),
        _roles(answer),
        *_totals(answer),
        "",
        Text("Why", style="bold"),
        *(item(line) for line in why(answer)),
        "",
        _memory(answer),
        "",
        _steps(answer),
        "",
        _compared(answer),
        "",
        _alone(answer),
        "",
        *_commands(answer),
    ]
    return Group(*shown)


def _question(q: Question) -> RenderableType:
    facts = model_facts(q.spec, q.work.isl, q.formats.weights_dtype, q.formats.kv_dtype)
    limits = [
        f"{name} {limit * 1e3:,.0f} ms"
        for name, limit in (("TTFT", q.work.ttft_s), ("TPOT", q.work.tpot_s))
        if limit is not None
    ]
    at_hand = (
        f"{q.gpus:,} x {q.hardware.name}" if q.gpus else f"{q.hardware.name}, as many as needed"
    )
    rate = f", {q.work.request_rate:g} requests/s" if q.work.request_rate else ""
    lines = [
        f"{q.model} on {at_hand}: {q.work.isl:,} tokens in, {q.work.osl:,} out{rate}; limits: "
        f"{', '.join(limits)}; experts' loads follow Zipf's law with exponent {q.work.zipf:g}",
        *facts.lines(),
    ]
    return Group(Text(lines[0], style="bold"), *(item(line) for line in lines[1:]))


def item(line: str, style: str = "") -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(" -", Text(line, style=style))
    return table


def _roles(answer: Answer) -> RenderableType:
    best, q = answer.best, answer.question
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    table.add_column("prefill")
    table.add_column("decode" if best.kind == "split" else "decode, on the same GPUs")
    sides = (best.prefill, best.decode)

    def row(name: str, values: Sequence[str]) -> None:
        table.add_row(f"  {name}", *(Text(value) for value in values))

    row("instances", [f"{s.instances} x {s.point.layout.gpus} GPUs" for s in sides])
    row("attention", [_attention(s.point) for s in sides])
    row("experts", [_experts(s.point, q) for s in sides])
    row("transport", [_transport(s.point) for s in sides])
    row("overlap", [_OVERLAP[s.point.layout.overlap] for s in sides])
    row("batch per GPU", [_batch(s.point) for s in sides])
    row("step", [f"{s.point.step.total * 1e3:,.1f} ms" for s in sides])
    row("capacity per GPU", [_speed(s.point, q) for s in sides])
    row("load", [f"{s.load:.0%} of capacity" for s in sides])
    row("batch bound by", [s.bound for s in sides])
    return table


_OVERLAP = {"off": "off", "sbo": "single-batch", "tbo": "two-batch"}


def _transport(point: Point) -> str:
    layout = point.layout
    if layout.gpus == 1 or layout.experts == "tp":
        return "none"
    return layout.mode.replace("_", "-")


def _attention(point: Point) -> str:
    layout = point.layout
    return f"DP{layout.dp}" + (f" x TP{layout.tp}" if layout.tp > 1 else "")


def _experts(point: Point, q: Question) -> str:
    if point.layout.experts == "tp":
        return f"TP{point.layout.tp}"
    redundant = redundant_experts(point.layout, q.spec)
    return f"EP{point.layout.gpus}" + (f", {redundant} redundant" if redundant else "")


def _batch(point: Point) -> str:
    what = "tokens a step" if point.phase == "prefill" else "sequences"
    return f"{point.batch:,.3g} {what}" if point.batch < 1000 else f"{point.batch:,.0f} {what}"


def _speed(point: Point, q: Question) -> str:
    way = "input" if point.phase == "prefill" else "output"
    return f"{number_text(tokens_per_gpu_s(point, q))} {way} tokens/s"


def _totals(answer: Answer) -> list[RenderableType]:
    best, q = answer.best, answer.question
    rates = Rates(best, q)
    cost = ""
    if rates.usd_per_million is not None and rates.usd_per_million_output is not None:
        cost = (
            f"; at ${q.price:g} per GPU hour {usd_text(rates.usd_per_million_output)} per million "
            f"output tokens, {usd_text(rates.usd_per_million)} per million of both"
        )
    missing = missing_here(best, q.spec, q.hardware)
    lines = [
        f"{rate_text(best.rate)} requests/s on {best.gpus:,} GPUs: "
        f"{number_text(rates.input_per_gpu)} input and {number_text(rates.output_per_gpu)} "
        f"output tokens/s per GPU, {number_text(1 / best.tpot_s)} tokens/s per user{cost}",
        f"TTFT {best.ttft_s * 1e3:,.0f} ms, TPOT {best.tpot_s * 1e3:,.1f} ms",
    ]
    if best.kind == "together":
        pause = f"{best.prefill.point.step.total * 1e3:,.0f} ms"
        lines.append(f"an answer pauses for {pause} whenever a full prefill step runs between")
    if q.gpus and best.gpus < q.gpus:
        lines.append(f"{q.gpus - best.gpus:,} of the {q.gpus:,} GPUs are left over")
    lines.append(
        "median error of such predictions against published rows: "
        + ", ".join(f"{role} {error:.0%}" for role, error in answer.errors.items())
        + " (crossdock plan --validate)"
    )
    shown: list[RenderableType] = ["", *(item(line) for line in lines)]
    if missing:
        text = f"not runnable with this version of crossdock: {', '.join(missing)}"
        shown.append(item(text, "bold yellow"))
        shown.append(_runnable(answer))
    return shown


def _runnable(answer: Answer) -> RenderableType:
    d, q = answer.runnable, answer.question
    if d is None:
        return item(f"nor does this version run any other layout for this: {answer.not_runnable}")
    rates, weights = Rates(d, q), d.decode.point.layout.weights_dtype
    return item(
        f"the best that it runs: {_describe(d, q)}, {weights} weights, on {d.gpus} GPUs: "
        f"{rate_text(d.rate)} requests/s, {number_text(rates.output_per_gpu)} output tokens/s per "
        f"GPU, TTFT {d.ttft_s * 1e3:,.0f} ms, TPOT {d.tpot_s * 1e3:,.1f} ms"
    )


def _memory(answer: Answer) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("Memory of one GPU, GB")
    shown = answer.memory
    if answer.best.kind == "together":
        shown = {"both roles": answer.memory["decode"]}
    for role in shown:
        table.add_column(role, justify="right")
    plans = list(shown.values())
    for part in plans[0].parts():
        table.add_row(f"  {part}", *(f"{plan.parts()[part] / GB:.2f}" for plan in plans))
    table.add_row("  sum", *(f"{plan.used_bytes / GB:.2f}" for plan in plans), style="bold")
    table.add_row("  may be filled", *(f"{plan.budget_bytes / GB:.2f}" for plan in plans))
    table.add_row("  left for KV", *(f"{plan.kv_bytes / GB:.2f}" for plan in plans), style="bold")
    table.add_row("  tokens per attention group", *(f"{plan.kv_tokens:,}" for plan in plans))
    table.add_row("  requests at these lengths", *(f"{plan.requests:,}" for plan in plans))
    return table


def _steps(answer: Answer) -> RenderableType:
    best = answer.best
    sides: list[tuple[str, Side]] = [("prefill", best.prefill), ("decode", best.decode)]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("Time of one step, ms")
    for name, _ in sides:
        table.add_column(name, justify="right")
        table.add_column("", justify="right")
    steps = [side.point.step for _, side in sides]
    names = dict.fromkeys(name for step in steps for name in step.parts)
    for name in names:
        if max(step.parts.get(name, 0.0) for step in steps) == 0.0:
            continue
        cells = []
        for step in steps:
            seconds = step.parts.get(name, 0.0)
            cells += [f"{seconds * 1e3:,.2f}", f"{seconds / sum(step.parts.values()):.0%}"]
        table.add_row(f"  {part_name(name)}", *cells)
    hidden = [cell for step in steps for cell in (f"-{step.hidden * 1e3:,.2f}", "")]
    table.add_row("  hidden by overlap", *hidden)
    total = [cell for step in steps for cell in (f"{step.total * 1e3:,.2f}", "")]
    table.add_row("  step", *total, style="bold")
    exposed = [c for s in steps for c in (f"{s.exposed_communication * 1e3:,.2f}", "")]
    table.add_row("  communication not hidden", *exposed)
    return table


def _compared(answer: Answer) -> RenderableType:
    q = answer.question
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("Beside it", overflow="fold", ratio=1)
    for column in ("GPUs", "requests/s", "out/s/GPU", "/s/user", "TTFT ms", "TPOT ms"):
        table.add_column(column, justify="right", no_wrap=True)
    rows: list[tuple[str, Deployment]] = [("recommended", answer.best)]
    rows += [("", d) for d in answer.runners_up]
    if answer.tensor_parallel is not None:
        rows.append(("experts by TP", answer.tensor_parallel))
    for name, d in rows:
        rates = Rates(d, q)
        head = f"{name}: " if name else ""
        flag = f" (overloaded: {q.work.request_rate:g} asked)" if d.overloaded else ""
        what = Text(f"{head}{_describe(d, q)}{flag}", style="bold" if d is answer.best else "")
        table.add_row(
            Padding(what, (0, 0, 0, 2)),
            f"{d.gpus:,}",
            rate_text(d.rate),
            number_text(rates.output_per_gpu),
            number_text(1 / d.tpot_s),
            f"{d.ttft_s * 1e3:,.0f}",
            f"{d.tpot_s * 1e3:,.1f}",
        )
    return table


def _describe(d: Deployment, q: Question) -> str:
    p, s = d.prefill, d.decode
    if d.kind == "together":
        return f"{p.instances} x {_layout(s.point, q)}, both phases"
    return f"{p.instances} x {_layout(p.point, q)} + {s.instances} x {_layout(s.point, q)}"


def _layout(point: Point, q: Question) -> str:
    layout = point.layout
    experts = _experts(point, q).split(",")[0]
    if layout.experts == "tp":
        return experts
    tp = f" TP{layout.tp}" if layout.tp > 1 else ""
    if layout.gpus == 1:
        return experts
    mode = {"normal": "normal", "low_latency": "LL"}[layout.mode]
    overlap = "" if layout.overlap == "off" else f" {layout.overlap.upper()}"
    return f"{experts}{tp} {mode}{overlap}"


def _alone(answer: Answer) -> RenderableType:
    q = answer.question
    lines = [
        f"{role}: {_layout(p, q)}, {_batch(p)} per GPU, {_speed(p, q)} per GPU"
        for role, p in answer.roles.items()
    ]
    prefill, decode = answer.roles["prefill"], answer.roles["decode"]
    ratio = decode.requests_per_gpu_s / prefill.requests_per_gpu_s
    lines.append(f"in balance: {ratio:.2f} GPUs prefill for each that decodes")
    head = Text("Each role by itself, the other assumed to keep up, as figures are published")
    head.stylize("bold")
    return Group(head, *(item(line) for line in lines))


def _commands(answer: Answer) -> list[RenderableType]:
    made = commands(answer)
    names = {"$MODEL": "MODEL, the checkpoint", "$HEAD": "HEAD, an instance's first node"}
    unset = [what for name, what in names.items() if any(name in c.line for c in made)]
    head = Text("Commands", style="bold")
    if unset:
        head.append(f" (set {' and '.join(unset)})", style="not bold")
    shown: list[RenderableType] = [head]
    last: Command | None = None
    for command in made:
        if last is None or (command.engine, command.where) != (last.engine, last.where):
            shown.append(Text(f"  {command.engine}, {command.where}"))
        line = command.line if "\n" in command.line else _folded(command.line)
        shown.append(Text(line, no_wrap=True, overflow="ignore"))
        last = command
    return shown


def _folded(line: str, width: int = 68) -> str:
    """A command over several lines, broken before flags, that a shell reads as one."""
    lines = [""]
    for word in line.replace(" --", "\0--").split("\0"):
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "    " + " \\\n        ".join(lines)
