"""What runs a rank's steps, with all that steps use compiled, captured and measured before the rank
is ready."""

from crossdock.comm import World
from crossdock.core import KV, EngineConfig, MLASpec, ModelSpec, OverlapMode
from crossdock.engine.eager import why_eager
from crossdock.engine.group import GroupSampler
from crossdock.engine.made_up import Limits, warm_sampler, warm_up
from crossdock.engine.overlap import OverlapPolicy, forced, refusals, unmeasured
from crossdock.engine.overlap_measure import measure_overlap
from crossdock.engine.prompt_inputs import KeyCopies
from crossdock.engine.runner import Graphs, Runner
from crossdock.engine.sampler import Sampler
from crossdock.models import Decoder, ModelContext


def build_runner(
    config: EngineConfig,
    spec: ModelSpec,
    context: ModelContext,
    model: Decoder,
    kv: KV,
    world: World,
) -> Runner:
    device, recorder, transport = world.device, context.recorder, context.transport
    sampler = Sampler(spec.vocab_size, device)
    if config.tp > 1:
        sampler = GroupSampler(spec.vocab_size, device, context.group)
    eager = why_eager(config, device, transport.on_device, model.attention.name)
    graphs: Graphs | None = None
    if eager is None:
        from crossdock.engine.graphs import StepGraphs  # imports triton

        of_gqa: KeyCopies = "gathered" if config.kv_cache_dtype == "fp8" else "none"
        copies: KeyCopies = "expanded" if isinstance(spec.attention, MLASpec) else of_gqa
        graphs = StepGraphs(
            model, kv, config.max_num_seqs, config.max_num_batched_tokens, context.max_model_len,
            spec.vocab_size, copies, device, recorder,
        )  # fmt: skip
    return Runner(model, kv, sampler, device, recorder, world.board, transport.check, graphs, eager)


def make_ready(
    config: EngineConfig, spec: ModelSpec, runner: Runner, world: World, limits: Limits
) -> OverlapPolicy:
    """Collective. Returns which overlap mode a step runs in."""
    overlap = _overlap(config, spec, runner, world, limits)
    if runner.graphs is not None:
        runner.graphs.capture_all(overlap.choose_graph)
    if world.device.type == "cuda":
        warm_sampler(runner.sampler)
        # Else measuring has run such steps.
        if runner.graphs is not None or len(overlap.ladder) == 1:
            warm_up(runner, world, limits, overlap.ladder[0].mode)
    return overlap


def _overlap(
    config: EngineConfig, spec: ModelSpec, runner: Runner, world: World, limits: Limits
) -> OverlapPolicy:
    if config.overlap != "auto":
        return forced(config.overlap)
    against = refusals(config, spec)
    both: tuple[OverlapMode, ...] = ("sbo", "tbo")
    modes = [mode for mode in both if mode not in against]
    if not modes:
        return unmeasured(next(iter(against.values())))
    return measure_overlap(modes, runner, world, limits)
