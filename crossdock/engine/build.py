"""From a configuration to a rank that can step."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crossdock.balance import linear_placement
from crossdock.cache import KVCache, page_bytes
from crossdock.comm import (
    World,
    build_apart,
    build_copies,
    build_counts,
    build_group,
    build_transport,
)
from crossdock.core import (
    ConfigError,
    EngineConfig,
    Model,
    ModelSpec,
    Placement,
    Transport,
    load_spec,
    shard_attention,
)
from crossdock.core.model_spec import DTYPE_BYTES
from crossdock.engine.engine import Engine
from crossdock.engine.group import Inbox, agreed_pages, exchanged_bytes
from crossdock.engine.made_up import Limits
from crossdock.engine.memory import (
    check_kv_dtype,
    expert_workspace,
    kv_budget,
    resolve_kv_dtype,
)
from crossdock.engine.overlap import check_overlap
from crossdock.engine.quantize import runs_in_fp8, wire_hidden
from crossdock.engine.ready import build_runner, make_ready
from crossdock.engine.rebalance import Rebalancer
from crossdock.engine.router_bias import BiasAdjuster
from crossdock.engine.runner import Runner
from crossdock.engine.timing import build_timer, timing_info
from crossdock.layers import SoloGroup
from crossdock.metrics import Recorder
from crossdock.models import Decoder, ModelContext, build_model
from crossdock.models.checkpoint import Checkpoint
from crossdock.models.dummy import DummyWeights
from crossdock.moe import RouterOptions, run_on_device
from crossdock.scheduler import Scheduler

OnProgress = Callable[[int, int], None]


def read_spec(config: EngineConfig) -> ModelSpec:
    """Of `config.model`, a directory or the file of a config.json; its first `layers` alone.

    Raises:
        CheckpointError, ConfigError: what is wrong with the file, or with `layers`.
    """
    spec = load_spec(Path(config.model))
    if config.layers is None:
        return spec
    if config.layers > spec.num_layers:
        raise ConfigError(f"layers {config.layers} is more than the model's {spec.num_layers}")
    routed = tuple(i for i in spec.moe_layers if i < config.layers)
    return replace(spec, num_layers=config.layers, moe_layers=routed)


def resolve_dtype(config: EngineConfig, spec: ModelSpec, device: str) -> str:
    """The dtype of activations, and of weights unless they are held in FP8."""
    if config.dtype != "auto":
        return config.dtype
    if device == "cpu":
        return "float32"
    return spec.dtype if spec.dtype in ("float32", "bfloat16", "float16") else "bfloat16"


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    wanted = config.max_model_len
    if wanted is not None and wanted > spec.max_position:
        raise ConfigError(
            f"max_model_len {wanted} is more than the model's {spec.max_position} positions"
        )
    return wanted or spec.max_position


def initial_placement(config: EngineConfig, spec: ModelSpec) -> Placement:
    return linear_placement(
        len(spec.moe_layers), spec.moe.num_experts, config.ranks, config.redundant_experts
    )


def experts_on_device(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether rows are handed to the experts without a word to the host."""
    return config.transport == "nvlink" and run_on_device(
        device, dtype, spec.hidden_size, spec.moe.intermediate_size, config.invariant
    )


def build_engine(config: EngineConfig, world: World, on_progress: OnProgress) -> Engine:
    """Loads this rank's weights and allocates its cache; `config.model` is a directory by now.

    Raises:
        CheckpointError, CapacityError, ConfigError: what is wrong and what to change.
    """
    started = time.perf_counter()
    config = config.for_device(world.device.type)
    spec = read_spec(config)
    check_overlap(config, spec)
    recorder = Recorder(on_device=world.device.type == "cuda")
    recorder.source("moe_layers", lambda: spec.moe_layers)
    context = _build_context(config, spec, world, recorder)
    max_len, dtype = context.max_model_len, context.dtype
    kv_dtype = resolve_kv_dtype(config, dtype)
    model = _load_model(config, spec, context, on_progress)
    check_kv_dtype(config, model.attention.name, world.device)
    heads = shard_attention(spec.attention, config.tp)
    one_page = page_bytes(heads, spec.num_layers, config.page_size, kv_dtype)
    budget = kv_budget(config, one_page, max_len, world.device)
    num_pages = agreed_pages(world, budget.num_pages)
    kv = KVCache(heads, spec.num_layers, num_pages, config.page_size, kv_dtype, world.device)
    runner = build_runner(config, spec, context, model, kv, world)
    limits = Limits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        max_len,
        config.page_size,
        num_pages,
        spec.vocab_size,
    )
    overlap = make_ready(config, spec, runner, world, limits)
    timer = build_timer(config, spec, model, one_page / config.page_size, recorder, world.device)
    recorder.reset()
    info = {
        **_facts(config, context, model, runner),
        "overlap": overlap.describe(),
        "kv_dtype": _name_of(kv_dtype),
        "kv_bytes": num_pages * one_page,
        "kv_tokens": num_pages * config.page_size,
        "kv_reason": budget.reason,
        **timing_info(config, recorder, world.device, _name_of(dtype), context.fp8),
        "load_seconds": time.perf_counter() - started,
    }
    scheduler = _build_scheduler(config, spec, context, num_pages)
    return Engine(
        world,
        scheduler,
        Inbox(scheduler, world.rank - world.rank % config.tp, config.tp),
        runner,
        context.transport,
        recorder,
        timer,
        _build_rebalancer(config, world, context.placement, model),
        overlap,
        _build_adjuster(config, world, model, recorder),
        info,
    )


def _facts(
    config: EngineConfig, context: ModelContext, model: Decoder, runner: Runner
) -> dict[str, Any]:
    """For people and documents; holds what JSON can."""
    facts: dict[str, Any] = {
        "device": str(context.device),
        "dtype": _name_of(context.dtype),
        "slots": context.placement.slots_per_rank,
        "fp8": context.fp8,
        "weight_bytes": model.weight_bytes,
        "transport": config.transport,
        "transport_bytes": getattr(context.transport, "nbytes", 0),
        "attention": f"{model.attention.name}: {model.attention.reason}",
        "graphs": runner.graphs_line,
    }
    if model.moe_layers:
        facts["expert_bytes"] = _expert_bytes(model)
    return facts


def _build_context(
    config: EngineConfig, spec: ModelSpec, world: World, recorder: Recorder
) -> ModelContext:
    """What the model is built into, the transport among it. Collective."""
    max_len = resolve_max_model_len(config, spec)
    name = resolve_dtype(config, spec, world.device.type)
    dtype = getattr(torch, name)
    fp8 = runs_in_fp8(config, spec, world.device, name, config.transport)
    placement = initial_placement(config, spec)
    transport = build_transport(
        config.transport,
        world,
        max_tokens=min(config.rank_tokens, config.max_dispatch_tokens),
        hidden=wire_hidden(spec, fp8),
        top_k=spec.moe.top_k,
        slots_per_rank=placement.slots_per_rank,
        dtype=dtype,
        per_expert=config.invariant,
        recorder=recorder,
        on_device=fp8 or experts_on_device(config, spec, world.device, dtype),
        fp8=fp8,
        low_latency_tokens=config.low_latency_tokens,
        dispatch_mode=config.dispatch_mode,
    )
    return ModelContext(
        rank=world.rank,
        device=world.device,
        dtype=dtype,
        invariant=config.invariant,
        placement=placement,
        transport=transport,
        recorder=recorder,
        max_model_len=max_len,
        board=world.board,
        expert_workspace=expert_workspace(config, world.device),
        fp8_experts=config.fp8_experts,
        fp8=fp8,
        attention=config.attention,
        fp8_cache=config.kv_cache_dtype == "fp8",
        routing=config.routing,
        apart=build_apart(config.transport, transport, world.device, recorder),
        router=_router_options(config, spec, world, recorder, transport),
        group=SoloGroup()
        if config.tp == 1
        else build_group(world, exchanged_bytes(config, spec, dtype.itemsize), recorder),
    )


def _build_scheduler(
    config: EngineConfig, spec: ModelSpec, context: ModelContext, num_pages: int
) -> Scheduler:
    name = _name_of(context.dtype)
    held = f"{name}, products in fp8" if context.fp8 else name
    held = f"{held}, cache in {_name_of(resolve_kv_dtype(config, context.dtype))}"
    layout = f"{config.model}|{config.revision}|{held}|{spec.attention}|{config.page_size}"
    return Scheduler(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=context.max_model_len,
        page_size=config.page_size,
        num_pages=num_pages,
        prefix_caching=config.prefix_caching,
        namespace=hashlib.sha256(layout.encode()).hexdigest(),
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _router_options(
    config: EngineConfig, spec: ModelSpec, world: World, recorder: Recorder, transport: Transport
) -> RouterOptions:
    near: tuple[tuple[int, ...], ...] = ()
    counts = None
    if config.replica_choice == "nearest":
        node = [r for r in range(world.size) if world.topology.same_node(world.rank, r)]
        near = ((world.rank,), tuple(node))
    if config.replica_choice == "quota":
        counts = build_counts(world, spec.moe.num_experts, recorder, transport)
    adjusted = config.router_bias_step is not None
    return RouterOptions(near, counts, config.expert_capacity, adjusted)


def _build_adjuster(
    config: EngineConfig, world: World, model: Model, recorder: Recorder
) -> BiasAdjuster | None:
    if config.router_bias_step is None or not model.moe_layers:
        return None
    return BiasAdjuster(
        world.lockstep,
        model.moe_layers,
        config.router_bias_step,
        config.router_bias_max,
        config.load_window_tokens,
        recorder,
    )


def _build_rebalancer(
    config: EngineConfig, world: World, placement: Placement, model: Model
) -> Rebalancer | None:
    if config.rebalance == "off" or not model.moe_layers:
        return None
    nbytes = _expert_bytes(model)
    places = placement.slots_per_rank
    copies = build_copies(world, places, nbytes)
    budget = max(1, int(config.rebalance_step_mib * (1 << 20)))  # with none no move would end
    return Rebalancer(world.rank, placement, model.moe_layers, copies, budget)


def _expert_bytes(model: Model) -> int:
    return sum(tensor[0].nbytes for tensor in model.moe_layers[0].slot_tensors())


def _load_model(
    config: EngineConfig, spec: ModelSpec, context: ModelContext, on_progress: OnProgress
) -> Decoder:
    if config.load == "dummy":
        source = DummyWeights(context.dtype, context.device, config.seed)
        return build_model(spec, source, context)
    # An estimate, for the progress bar: norms are left out, an expert in two slots is read once.
    stored = DTYPE_BYTES["float8_e4m3fn" if spec.quant else spec.dtype]
    experts = min(context.placement.slots_per_rank, spec.moe.num_experts)
    to_read = stored * spec.params_with(experts)
    with Checkpoint(
        Path(config.model), spec.quant, context.dtype, context.device, on_progress, to_read
    ) as checkpoint:
        return build_model(spec, checkpoint, context)
