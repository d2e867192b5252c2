"""Starting an engine from the command line: its progress, and what came of it."""

from typing import Any

from crossdock.cli.output import Output
from crossdock.core import EngineConfig, ModelSpec
from crossdock.launch import EngineClient, launch

GIB = 2**30


def start_engine(config: EngineConfig, output: Output) -> EngineClient:
    """A client whose ranks are ready. Progress counts the weights of all ranks together."""
    done: dict[int, tuple[int, int]] = {}
    what = f"loading {config.model}"
    with output.progress() as tell:
        tell(what, 0, None)

        def on_progress(rank: int, loaded: int, total: int) -> None:
            done[rank] = (loaded, total)
            # Ranks that have said nothing yet will load about as much as those that have.
            expected = sum(t for _, t in done.values()) * config.ranks / len(done)
            tell(what, sum(n for n, _ in done.values()), expected)

        return launch(config, on_progress)


def describe(client: EngineClient) -> dict[str, Any]:
    """What runs now: model, ranks, placement, memory."""
    spec, config = client.spec, client.config
    slots = [rank["slots"] for rank in client.info]
    return {
        "model": client.model_name,
        "architecture": spec.architecture,
        "parameters": spec.num_params,
        "ranks": config.ranks,
        "tp": config.tp,
        "tp_padding": tp_padding(spec, config.tp),
        "device": client.info[0]["device"].split(":")[0],
        "dtype": client.info[0]["dtype"],
        "fp8": client.info[0]["fp8"],
        "quantised": spec.quant is not None,
        "threads_per_rank": config.threads,
        "invariant": config.invariant,
        "altering": config.altering,
        "experts": spec.moe.num_experts,
        "slots": sum(slots),
        "max_model_len": client.max_model_len,
        "sampling_defaults": client.sampling_defaults,
        "transport": client.info[0]["transport"],
        "attention": client.info[0]["attention"],
        "kv_dtype": client.info[0]["kv_dtype"],
        "overlap": client.info[0]["overlap"],
        "graphs": client.info[0]["graphs"],
        "ceilings": client.info[0]["ceilings"],
        "gpu_activity": client.info[0].get("gpu_activity"),
        "transport_bytes": max(rank["transport_bytes"] for rank in client.info),
        "rank_memory": [
            {k: rank[k] for k in ("device", "weight_bytes", "kv_bytes", "kv_tokens")}
            for rank in client.info
        ],
        "load_seconds": max(rank["load_seconds"] for rank in client.info),
    }


def lines_of(facts: dict[str, Any]) -> list[str]:
    """The same for people."""
    mode = ", invariant" if facts["invariant"] else ""
    where = f"{facts['ranks']} x {facts['device']}"
    if facts["tp"] > 1:
        where += f", {facts['tp']} to an attention group"
    threads = f"{facts['threads_per_rank']} thread" + "s" * (facts["threads_per_rank"] > 1)
    nbytes = facts["transport_bytes"]
    buffers = f", {_size(nbytes)} of buffers a rank" if nbytes else ""
    lines = [
        f"model      {facts['model']} ({facts['architecture']}, "
        f"{_count(facts['parameters'])} parameters, {dtype_line(facts)})",
        f"ranks      {where}, {threads} each{mode}; context {facts['max_model_len']:,} tokens",
        f"attention  {facts['attention']}",
        f"transport  {facts['transport']}{buffers}",
        f"overlap    {overlap_line(facts['overlap'])}",
        f"placement  {placement_line(facts['experts'], facts['ranks'], facts['slots'])}",
    ]
    if facts["device"] == "cuda":
        lines.append(f"graphs     {facts['graphs']}")
    if facts["tp"] > 1:
        lines.append(f"tp         {padding_line(facts['tp_padding'])}")
    if facts["gpu_activity"] is not None:
        lines.append(f"gpu use    {activity_line(facts)}")
    if facts["sampling_defaults"]:
        own = ", ".join(f"{name} {value:g}" for name, value in facts["sampling_defaults"].items())
        lines.append(f"sampling   {own} (generation_config.json), where a request names none")
    if facts["altering"]:
        said = ", ".join(f"{name} {value:g}" for name, value in facts["altering"].items())
        lines.append(f"answers    depend on what else is served: {said}")
    fp8 = facts["kv_dtype"].startswith("float8")
    cache = " in FP8" if fp8 else ""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, m in enumerate(facts["rank_memory"]):
        key = (m["weight_bytes"], m["kv_bytes"], m["kv_tokens"])
        groups.setdefault(key, []).append(rank)
    for (weights, kv, tokens), ranks in groups.items():
        lines.append(
            f"memory     rank {_span(ranks)}: weights {_size(weights)}, "
            f"KV {_size(kv)} for {tokens:,} tokens{cache}"
        )
    return lines


def tp_padding(spec: ModelSpec, tp: int) -> dict[str, float]:
    """By dimension that tp divides: the share of the kernels' tiles of 128 that holds nothing."""
    if tp == 1:
        return {}
    from crossdock.planner.alignment import shards_of_tp

    return {s.name: round(s.wasted, 4) for s in shards_of_tp(spec, tp) if s.kind == "matrix"}


def padding_line(padding: dict[str, float]) -> str:
    lost = [f"{share:.1%} of the {name}" for name, share in padding.items() if share]
    if not lost:
        return "nothing is lost to padding"
    return f"lost to padding of shards to tiles of 128: {', '.join(lost)}"


def activity_line(facts: dict[str, Any]) -> str:
    """Of GPU ranks: which of their figures `/metrics` has, and from where."""
    ceilings, activity = facts["ceilings"], facts["gpu_activity"]
    of = "no mfu and mbu: this kind of GPU is not shipped; name one or a measured file as hardware"
    if ceilings is not None:
        flops, nbytes = ceilings["flops_per_s"] / 1e12, ceilings["bytes_per_s"] / 1e12
        of = f"mfu and mbu of {flops:,.0f} TFLOP/s and {nbytes:,.2f} TB/s ({ceilings['source']})"
    shown = activity.startswith("from")
    return f"{of}; SM, tensor and DRAM activity {activity if shown else f'absent: {activity}'}"


def placement_line(experts: int, ranks: int, slots: int) -> str:
    each = slots // ranks
    if slots == experts:
        return f"{experts} experts, {each} a rank"
    extra = slots - experts
    line = f"{experts} experts and {extra} replica{'s' * (extra > 1)}, {each} a rank"
    if experts % ranks and each == -(-experts // ranks):
        line += f" ({ranks} ranks do not divide {experts}: slots rounded up)"
    return line


def dtype_line(facts: dict[str, Any]) -> str:
    if facts["fp8"]:
        return f"{facts['dtype']}, products and experts in FP8"
    return f"{facts['dtype']}, dequantised from FP8" if facts["quantised"] else facts["dtype"]


def overlap_line(overlap: dict[str, Any]) -> str:
    """What runs while rows travel, from how many tokens of the fullest rank on, and why."""
    ran: list[str] = []
    for rung in overlap["ladder"]:
        mode = "tbo" if rung["halves"] else rung["whole"]
        if not ran or not ran[-1].startswith(mode):
            ran.append(f"{mode} from {rung['tokens']} tokens" if ran else mode)
    return f"{', '.join(ran)} ({overlap['why']})"


def _span(ranks: list[int]) -> str:
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"


def _count(count: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return f"{count / 1e3:.1f}K"
