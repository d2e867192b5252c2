"""Ready commands: crossdock's own, and flags of SGLang 0.5.23 and vLLM 0.33.0 that mean the same.

SGLang counts chunk and running requests over all attention groups, vLLM's batched tokens and
sequences are of one; both count redundant experts over all ranks.
"""

import json
import math
import shlex
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from crossdock.core import EngineConfig, ModelSpec
from crossdock.core.config import TP_SIZES
from crossdock.core.hf_config import ARCHITECTURES
from crossdock.core.staging import SCALE_BLOCK
from crossdock.core.tensor_parallel import why_not_tp
from crossdock.planner.hardware import Hardware
from crossdock.planner.layout import Layout
from crossdock.planner.memory import MEMORY_SHARE
from crossdock.planner.search_deployment import Deployment, Side

GPUS_OF_A_HOST = 8
"""At most: an NVLink domain may join several hosts, one operating system does not."""
SGLANG, VLLM = "0.5.23", "0.33.0"
SGLANG_LOW_LATENCY_TOKENS = 128
"""Default of its low-latency buffers, per rank; 1,024 at most."""


@dataclass(frozen=True)
class Command:
    """`engine`: who runs it; `where`: on which machines; `line`: what to type there."""

    engine: str
    where: str
    line: str


def missing_here(deployment: Deployment, spec: ModelSpec, hardware: Hardware) -> tuple[str, ...]:
    """What of a deployment this version of crossdock cannot run; empty: it can."""
    missing = ["prefill and decode on separate instances"] if deployment.kind == "split" else []
    for side in (deployment.prefill, deployment.decode):
        missing += missing_in_layout(side.point.layout, spec, hardware)
    return tuple(dict.fromkeys(missing))


def missing_in_layout(layout: Layout, spec: ModelSpec, hardware: Hardware) -> list[str]:
    offered, fp8_weights = get_type_hints(EngineConfig), _is_fp8(layout.weights_dtype)
    rules = (
        (spec.architecture not in ARCHITECTURES, f"architecture {spec.architecture}"),
        (_is_amd(hardware), "GPUs of AMD"),
        (
            layout.gpus > min(hardware.domain_size, GPUS_OF_A_HOST),
            "an instance over several nodes",
        ),
        (layout.experts == "tp", "experts sharded by tensor parallelism"),
        (layout.tp not in TP_SIZES, f"attention over {layout.tp} ranks (tp)"),
        (
            layout.tp in TP_SIZES
            and bool(why_not_tp(spec, layout.tp, SCALE_BLOCK if fp8_weights else None)),
            f"this model's attention over {layout.tp} ranks (tp)",
        ),
        (
            not weights_run(layout.weights_dtype, hardware),
            f"weights kept in {layout.weights_dtype}",
        ),
        (not kv_runs(layout.kv_dtype, hardware), f"KV in {layout.kv_dtype}"),
        (layout.overlap == "tbo" and "overlap" not in offered, "two-batch overlap"),
        (
            layout.mode == "low_latency" and "nvlink" not in get_args(offered["transport"]),
            "low-latency transport",
        ),
    )
    return [what for is_missing, what in rules if is_missing]


def crossdock_commands(
    model: str, deployment: Deployment, spec: ModelSpec, isl: int, osl: int
) -> list[Command]:
    """One `serve` for each instance of a deployment that runs here, and its settings file."""
    p, d = deployment.prefill, deployment.decode
    layout = p.point.layout
    settings: dict[str, Any] = {
        "tp": layout.tp,
        "max_num_seqs": max(1, round(d.most * layout.tp)),
        "max_num_batched_tokens": round(p.point.batch * layout.tp),
        "max_model_len": isl + osl,
        "redundant_experts": redundant_experts(layout, spec),
        "gpu_memory_utilization": MEMORY_SHARE,
    }
    text = "\n".join(f"{key} = {value}" for key, value in settings.items())
    if layout.experts == "ep" and layout.gpus > 1:
        text += '\nrebalance = "auto"'  # the plan's loads are those after EPLB
    if _is_fp8(layout.weights_dtype) != (spec.quant is not None):
        text += f'\nquantize = "{"fp8" if _is_fp8(layout.weights_dtype) else "none"}"'
    if _is_fp8(layout.kv_dtype):
        text += '\nkv_cache_dtype = "fp8"'
    name = "crossdock-plan.toml"
    where = "the instance"
    if p.instances > 1:
        where = f"each of {p.instances} instances, with a --port and GPUs of its own"
    return [
        Command("crossdock", where, f"cat > {name} <<END\n{text}\nEND"),
        Command(
            "crossdock",
            where,
            f"crossdock serve {_checkpoint(model)} --ranks {layout.gpus} --config {name}",
        ),
    ]


def weights_run(dtype: str, hardware: Hardware) -> bool:
    """Whether crossdock keeps weights in `dtype` there: FP8 where the GPU multiplies it."""
    return dtype in _plain() or (_is_fp8(dtype) and dtype in hardware.flops)


def kv_runs(dtype: str, hardware: Hardware) -> bool:
    """The same for KV: the kernels convert E4M3 where the GPU multiplies it."""
    return weights_run(dtype, hardware)


def _plain() -> tuple[str, ...]:
    return get_args(get_type_hints(EngineConfig)["dtype"])


def _is_fp8(dtype: str) -> bool:
    return dtype.startswith("float8")


def redundant_experts(layout: Layout, spec: ModelSpec) -> int:
    """Slots of all ranks of an instance beyond one per expert, in each MoE layer."""
    if layout.experts == "tp" or layout.gpus == 1:
        return 0
    slots = -(-spec.moe.num_experts // layout.gpus) + layout.redundant_per_rank
    return slots * layout.gpus - spec.moe.num_experts


def sglang_commands(
    model: str, deployment: Deployment, spec: ModelSpec, hardware: Hardware
) -> list[Command]:
    made = [
        Command(f"SGLang {SGLANG}", where, line)
        for side, role in _roles(deployment)
        for where, line in [_sglang(model, side, role, deployment, spec, hardware)]
    ]
    if deployment.kind == "split":
        prefill, decode = (
            " ".join(f"--{role} http://{role.upper()}_{i}:30000" for i in range(side.instances))
            for side, role in _roles(deployment)
        )
        line = f"python -m sglang_router.launch_router --pd-disaggregation {prefill} {decode}"
        made.append(Command(f"SGLang {SGLANG}", "the router", line))
    return made


def vllm_commands(
    model: str, deployment: Deployment, spec: ModelSpec, hardware: Hardware
) -> list[Command]:
    return [
        Command(f"vLLM {VLLM}", where, line)
        for side, role in _roles(deployment)
        for where, line in [_vllm(model, side, role, deployment, spec, hardware)]
    ]


def _roles(deployment: Deployment) -> list[tuple[Side, str]]:
    if deployment.kind == "together":
        return [(deployment.decode, "both")]
    return [(deployment.prefill, "prefill"), (deployment.decode, "decode")]


def _where(side: Side, role: str, nodes: int) -> str:
    name = "" if role == "both" else f"{role}: "
    each = f"each of {side.instances} instances" if side.instances > 1 else "the instance"
    return f"{name}{each}" + (f", on its nodes NODE = 0 to {nodes - 1}" if nodes > 1 else "")


def _sglang(
    model: str,
    side: Side,
    role: str,
    deployment: Deployment,
    spec: ModelSpec,
    hardware: Hardware,
) -> tuple[str, str]:
    layout = side.point.layout
    nodes = max(1, -(-layout.gpus // hardware.domain_size))
    chunk = round(deployment.prefill.point.batch) * layout.gpus
    running = max(1, round(deployment.decode.most * layout.gpus))
    flags = [f"--model-path {_checkpoint(model)}", f"--tp-size {layout.gpus}"]
    if nodes > 1:
        flags += [f"--nnodes {nodes}", "--node-rank $NODE", "--dist-init-addr $HEAD:20000"]
    before = ""
    if layout.experts == "ep" and layout.gpus > 1:
        flags += [f"--ep-size {layout.gpus}", *_sglang_exchange(layout, role, hardware)]
        if layout.dp > 1:
            flags += [f"--attn-dp-size {layout.dp}", "--enable-dp-lm-head"]
            if layout.tp == 1 and len(spec.moe_layers) < spec.num_layers:
                flags.append("--moe-dense-tp-size 1")
        tokens = min(1024, max(SGLANG_LOW_LATENCY_TOKENS, math.ceil(side.most)))
        if layout.mode == "low_latency":
            before = f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK={tokens} "
        redundant = redundant_experts(layout, spec)
        if redundant:
            flags += ["--enable-eplb", f"--ep-num-redundant-experts {redundant}"]
    if layout.overlap != "off":
        name = {"sbo": "single", "tbo": "two"}[layout.overlap]
        flags.append(f"--enable-{name}-batch-overlap")
    if _is_fp8(layout.kv_dtype):
        flags.append("--kv-cache-dtype fp8_e4m3")
    if role in ("prefill", "both"):
        flags.append(f"--chunked-prefill-size {chunk}")
    if role in ("decode", "both"):
        flags.append(f"--max-running-requests {running}")
    if role != "both":
        flags.append(f"--disaggregation-mode {role}")
    line = f"{before}python -m sglang.launch_server {' '.join(flags)}"
    return _where(side, role, nodes), line


def _sglang_exchange(layout: Layout, role: str, hardware: Hardware) -> list[str]:
    if _is_amd(hardware):
        return ["--moe-a2a-backend mori"]
    if hardware.domain_size > 8 and layout.gpus <= hardware.domain_size and layout.tp == 1:
        return ["--moe-a2a-backend flashinfer"]
    mode = "auto" if role == "both" else layout.mode
    return ["--moe-a2a-backend deepep", f"--deepep-mode {mode}"]


def _vllm(
    model: str,
    side: Side,
    role: str,
    deployment: Deployment,
    spec: ModelSpec,
    hardware: Hardware,
) -> tuple[str, str]:
    layout = side.point.layout
    nodes = max(1, -(-layout.gpus // hardware.domain_size))
    flags = [f"--tensor-parallel-size {layout.tp}"]
    if layout.dp > 1:
        local = layout.dp // nodes
        flags.append(f"--data-parallel-size {layout.dp}")
        if nodes > 1:
            flags += [
                f"--data-parallel-size-local {local}",
                f"--data-parallel-start-rank $((NODE * {local}))",
                "--data-parallel-address $HEAD --data-parallel-rpc-port 29550",
                "$([ $NODE = 0 ] || echo --headless)",
            ]
    if layout.experts == "ep" and layout.gpus > 1:
        # One backend serves both phases, and low latency has a buffer for a whole step per expert.
        steps = deployment.prefill.point.layout if role == "both" else layout
        backend = _vllm_backend(layout, steps.mode == "low_latency", hardware)
        flags += ["--enable-expert-parallel", f"--all2all-backend {backend}"]
        redundant = redundant_experts(layout, spec)
        if redundant:
            config = json.dumps({"num_redundant_experts": redundant})
            flags += ["--enable-eplb", f"--eplb-config {shlex.quote(config)}"]
    if layout.overlap == "tbo":
        flags.append("--enable-dbo")
    if _is_fp8(layout.kv_dtype):
        flags.append("--kv-cache-dtype fp8")
    tokens = (
        round(deployment.prefill.point.batch * layout.tp)
        if role in ("prefill", "both")
        else max(1, round(side.most * layout.tp))
    )
    flags.append(f"--max-num-batched-tokens {tokens}")
    if role in ("decode", "both"):
        sequences = max(1, round(deployment.decode.most * layout.tp))
        flags.append(f"--max-num-seqs {sequences}")
    if role != "both":
        connector = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
        flags.append(f"--kv-transfer-config {shlex.quote(connector)}")
    return _where(side, role, nodes), f"vllm serve {_checkpoint(model)} {' '.join(flags)}"


def _vllm_backend(layout: Layout, low: bool, hardware: Hardware) -> str:
    if _is_amd(hardware):
        return "mori_low_latency" if low else "mori_high_throughput"
    if hardware.domain_size > 8 and layout.gpus <= hardware.domain_size:
        return "flashinfer_nvlink_one_sided"
    return "deepep_low_latency" if low else "deepep_high_throughput"


def _checkpoint(model: str) -> str:
    """A description, shipped or in a file, is no checkpoint: whoever runs it names one."""
    described = "/" not in model or model.endswith((".toml", ".json"))
    return "$MODEL" if described else shlex.quote(model)


def _is_amd(hardware: Hardware) -> bool:
    return hardware.name.startswith("mi")
