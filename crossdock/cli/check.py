"""`check`: what is here, and what of crossdock can run on it."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from crossdock.cli.output import JsonFlag, output_of

GIB = 2**30


def check(
    ctx: typer.Context,
    measure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure what this machine reaches and write it for `plan --gpu FILE`; under "
            "torchrun, all its hosts and the network between them.",
        ),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Prove that moving this model's experts while serving changes no answer: on 1, 2 "
            "and 4 ranks against one that moves nothing.",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Looks at this machine: versions, devices, links, memory, and what can run here."""
    from crossdock.cli.doctor import examine

    if placement is not None:
        _prove(ctx, placement)
        return
    if measure is not None:
        _measure(ctx, measure)
        return
    found = examine()
    output_of(ctx).result(found, _human(found))
    if not any(c["works"] for c in found["capabilities"]):
        raise typer.Exit(1)


def _measure(ctx: typer.Context, path: Path) -> None:
    from crossdock.bench.measure import measured

    output = output_of(ctx)
    with output.stages() as stage:
        stage("measuring: copies, matrix products, links, all-to-alls")
        document = measured(path)
    if document is not None:
        output.result(document, Text(f"written: {path}\n\n{document['text']}"))


def _prove(ctx: typer.Context, model: str) -> None:
    from dataclasses import asdict

    from crossdock.launch.rebalance_check import prove

    output = output_of(ctx)
    with output.stages() as stage:
        proofs = list(prove(model, stage))
    holds = all(proof.holds for proof in proofs)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("mode", "ranks", "slots", "moves", "layers", "steps", "compared", "differ"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    table.add_column("worst", justify="right")
    for proof in proofs:
        *cells, worst = asdict(proof).values()
        table.add_row(*map(str, cells), f"{worst:.2g}")
    text = (
        "invariant: tokens and log-probabilities, bit by bit; ordinary: log-likelihoods of texts, "
        "to rounding\n" + ("Moving experts changes nothing." if holds else "Answers differ.")
    )
    cases = [{**asdict(proof), "holds": proof.holds} for proof in proofs]
    output.result({"model": model, "holds": holds, "cases": cases}, Group(table, Text(text)))
    if not holds:
        raise typer.Exit(1)


def _human(found: dict[str, Any]) -> RenderableType:
    cpu, shared = found["cpu"], found["shared_memory"]
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    packages = ", ".join(f"{k} {v}" for k, v in found["packages"].items() if v)
    facts.add_row("Python", f"{found['python']} on {found['platform']}")
    facts.add_row("packages", packages)
    facts.add_row("NCCL", found["nccl"] or "none")
    facts.add_row("processor", f"{cpu['name']}, {cpu['memory_order']}")
    facts.add_row(
        "memory", f"{cpu['free_bytes'] / GIB:.1f} of {cpu['memory_bytes'] / GIB:.1f} GiB free"
    )
    facts.add_row(
        "shared memory",
        f"memfd {'yes' if shared['memfd'] else 'no'}, "
        f"/dev/shm {shared['dev_shm_free_bytes'] / GIB:.1f} GiB free",
    )
    for device in found["devices"]:
        facts.add_row(
            f"cuda:{device['index']}",
            f"{device['name']}, {device['free_bytes'] / GIB:.1f} of "
            f"{device['memory_bytes'] / GIB:.1f} GiB free, capability {device['capability']}",
        )
    parts: list[RenderableType] = [facts]
    if found["links"]:
        parts.append(_links(found))
    parts.append(_capabilities(found))
    parts += [Text(f"problem: {p}", style="bold red") for p in found["problems"]]
    return Group(*parts)


def _links(found: dict[str, Any]) -> Table:
    table = Table(title="links between GPUs (+: peers read each other)", title_justify="left")
    indices = [device["index"] for device in found["devices"]]
    table.add_column("")
    for index in indices:
        table.add_column(f"{index}", justify="right")
    names = {
        (link["a"], link["b"]): f"{link['link'] or '?'}{'+' if link['peer_access'] else ''}"
        for link in found["links"]
    }
    for a in indices:
        cells = ("" if a == b else names[min(a, b), max(a, b)] for b in indices)
        table.add_row(f"{a}", *cells)
    return table


def _capabilities(found: dict[str, Any]) -> Table:
    table = Table(title="what can run here", title_justify="left")
    for column in ("", "", "why"):
        table.add_column(column)
    for c in found["capabilities"]:
        mark = Text("yes", style="green") if c["works"] else Text("no", style="yellow")
        table.add_row(c["name"], mark, c["reason"])
    return table
