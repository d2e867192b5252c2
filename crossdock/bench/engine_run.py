"""Runs the engines of `bench engine`: on CPUs side by side in turns; on GPUs, whose memory one
fills, one after another."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crossdock.bench.anchors import Anchors, Load
from crossdock.bench.child import Child
from crossdock.bench.engine_variants import EngineOptions, Variant, child_of, on_gpus, variants_of
from crossdock.bench.measure import measure_here
from crossdock.bench.report import write_document
from crossdock.bench.workload import random_prompts
from crossdock.core import ConfigError, CrossdockError, EngineConfig
from crossdock.core.ceilings import Ceilings
from crossdock.engine import read_spec
from crossdock.launch.start import find_model, find_tokenizer

WARMUP_TOKENS = 8
FIRST_PROMPT = 16
TRACED_STEPS = 400
"""Most steps of a turn that are timed one by one."""

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """Seconds from the start of the engine's process. `compiled`: kernels that were added to
    Triton's cache meanwhile; with some of them it was a cold one."""

    ready_s: float
    first_token_s: float
    compiled: int


@dataclass(eq=False)
class Ran:
    """Of one variant. `answers`: by load, one per repeat, as the child answers; `traced`: of one
    more turn of the last load, whose steps were all timed; None where there was none.
    `memory_mib`: of each GPU, held at the end. `refused`: why it did not run; nothing else then."""

    facts: dict[str, Any] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    answers: dict[Load, list[dict[str, Any]]] = field(default_factory=dict)
    traced: dict[str, Any] | None = None
    memory_mib: list[float] = field(default_factory=list)
    refused: str = ""


@dataclass(frozen=True)
class EngineRun:
    """`prompt_tokens`: of all prompts of a load together. `ceilings`: of a rank's device."""

    options: EngineOptions
    ran: dict[Variant, Ran]
    prompt_tokens: dict[Load, int]
    ceilings: Ceilings
    one_by_one: bool

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(v for v, ran in self.ran.items() if not ran.refused)


def run_engines(options: EngineOptions, on_progress: OnProgress = lambda what: None) -> EngineRun:
    """All variants on the same prompts.

    Prefix caching is off: the repeats would be answered from it. What `compare` adds may fail: then
    the reason is kept, and the others run.

    Raises:
        UserError, CrossdockError: an engine that was asked for by itself does not start or run.
    """
    variants, loads = variants_of(options), loads_of(options)
    prompts = {load: _prompts(options, load) for load in loads}
    on_gpu = on_gpus(options)
    session = _Session(options, prompts, on_progress)
    if on_gpu:
        for variant in variants:
            session.alone(variant)
    else:
        session.together(variants)
    first = session.ran[variants[0]]
    if options.trace is not None:
        assert first.traced is not None
        write_document(first.traced.pop("timeline"), options.trace, "--trace")
    counts = {load: sum(map(len, of)) for load, of in prompts.items()}
    ceilings = _ceilings(first.facts, on_gpu, on_progress)
    return EngineRun(options, session.ran, counts, ceilings, on_gpu)


def loads_of(options: EngineOptions) -> tuple[Load, ...]:
    if options.anchors:
        if len(set(options.ranks)) > 1:
            raise ConfigError(
                "--anchors: its loads grow with the ranks; give one number of --ranks"
            )
        return Anchors().loads(options.ranks[0], options.anchors)
    return (Load("", options.num_prompts, options.input_len, options.output_len),)


class _Session:
    """`ran`: by variant, in the order in which they began."""

    def __init__(
        self,
        options: EngineOptions,
        prompts: dict[Load, list[list[int]]],
        on_progress: OnProgress,
    ):
        self._options, self._prompts, self._say = options, prompts, on_progress
        self.ran: dict[Variant, Ran] = {}

    def together(self, variants: Sequence[Variant]) -> None:
        with ExitStack() as stack:
            children = {}
            for variant in variants:
                try:
                    children[variant] = self._start(variant, stack)
                except CrossdockError as error:
                    self._refuse(variant, error)
            for variant, child in children.items():
                self._warm(variant, child)
            for turn in range(self._options.repeats):
                for variant in _order(tuple(children), turn):
                    self._turn(variant, children[variant], turn)
            for variant, child in children.items():
                # What a trace costs is nobody's throughput, so it has a turn of its own.
                if self._options.trace is not None and variant.ranks:
                    self._trace(variant, child)

    def alone(self, variant: Variant) -> None:
        """From start to end."""
        try:
            with ExitStack() as stack:
                child = self._start(variant, stack)
                if self.ran[variant].starts[0].compiled and self._starts_again(variant):
                    stack.close()
                    child = self._start(variant, stack)
                self._warm(variant, child)
                for turn in range(self._options.repeats):
                    self._turn(variant, child, turn)
                self.ran[variant].memory_mib = gpu_memory_mib(variant.ranks or 1)
                if variant.ranks and (variant.changed is None and not variant.again):
                    self._trace(variant, child)
        except CrossdockError as error:
            self._refuse(variant, error)

    def _start(self, variant: Variant, stack: ExitStack) -> Child:
        self._say(f"starting {variant.name}")
        module, settings = child_of(self._options, variant)
        kernels, began = _cached_kernels(), time.perf_counter()
        child = stack.enter_context(Child(module, variant.name, variant.threads))
        ran = self.ran.setdefault(variant, Ran())
        ran.facts = child.ask(settings)
        ready_s = time.perf_counter() - began
        some = next(iter(self._prompts.values()))[0][:FIRST_PROMPT]
        child.ask({"prompts": [some], "output_len": 1})
        first_s = time.perf_counter() - began
        ran.starts.append(Start(ready_s, first_s, _cached_kernels() - kernels))
        return child

    def _starts_again(self, variant: Variant) -> bool:
        """With the kernels that a cold start left: where one so is judged, and none will be."""
        options = self._options
        if not options.anchors or options.compare:
            return False
        return Anchors().judges_start(options.model, variant.ranks, options.settings)

    def _refuse(self, variant: Variant, error: CrossdockError) -> None:
        if variant.changed is None:
            raise error
        self._say(f"{variant.name} does not run: {error}")
        self.ran[variant] = Ran(refused=str(error))

    def _warm(self, variant: Variant, child: Child) -> None:
        self._say(f"warming up {variant.name}")
        load, prompts = next(iter(self._prompts.items()))
        length = WARMUP_TOKENS if self._options.anchors else min(WARMUP_TOKENS, load.output_len)
        child.ask({"prompts": prompts, "output_len": length})

    def _turn(self, variant: Variant, child: Child, turn: int) -> None:
        for load, prompts in self._prompts.items():
            what = f"{load.name}: {variant.name}" if load.name else variant.name
            self._say(f"{turn + 1} of {self._options.repeats}: {what}")
            answer = child.ask({"prompts": prompts, "output_len": load.output_len})
            self.ran[variant].answers.setdefault(load, []).append(answer)

    def _trace(self, variant: Variant, child: Child) -> None:
        self._say(f"tracing {variant.name}")
        load, prompts = list(self._prompts.items())[-1]
        first = all(ran.traced is None for ran in self.ran.values())
        self.ran[variant].traced = child.ask(
            {
                "prompts": prompts,
                "output_len": load.output_len,
                "traced_steps": TRACED_STEPS,
                "timeline": first and self._options.trace is not None,
            }
        )


def _order(variants: tuple[Variant, ...], turn: int) -> Iterator[Variant]:
    """Every other turn backwards, so that no engine always follows the same one."""
    return iter(variants) if turn % 2 == 0 else reversed(variants)


def _cached_kernels() -> int:
    """Entries of Triton's cache."""
    home = Path(os.environ.get("TRITON_HOME", Path.home()))
    folder = Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def gpu_memory_mib(count: int) -> list[float]:
    """What is held on each of the first `count` GPUs, by whomever; torch gives nothing back, so
    after a load that is its peak. Empty where nvidia-smi is missing, or numbers GPUs otherwise."""
    tool = shutil.which("nvidia-smi")
    if tool is None or "CUDA_VISIBLE_DEVICES" in os.environ:
        return []
    query = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    try:
        return [float(line) for line in done.stdout.split()[:count]]
    except ValueError:  # such as "[N/A]"
        return []


def _ceilings(facts: dict[str, Any], on_gpu: bool, on_progress: OnProgress) -> Ceilings:
    """As the engine knows them; where nobody does, as this machine shows them now."""
    rank = facts["ranks"][0]
    if rank["ceilings"] is not None:
        return Ceilings(**rank["ceilings"])
    on_progress("measuring what this machine reaches")
    values = measure_here("cuda" if on_gpu else "cpu")
    return Ceilings(
        values["matmul_tflop_per_s"][rank["dtype"]] * 1e12,
        values["memory_gbytes_per_s"] * 1e9,
        "measured in this run",
    )


def _prompts(options: EngineOptions, load: Load) -> list[list[int]]:
    config = EngineConfig(options.model, **options.settings)
    config = replace(config, model=str(find_model(config)))
    if options.prompts_file is None:
        vocabulary = range(read_spec(config).vocab_size)
        length = (load.output_len, load.output_len)
        seed = load.name or "0"
        prompts = random_prompts(load.num_prompts, load.input_len, length, vocabulary, seed)
        return [list(p.token_ids) for p in prompts]
    try:
        lines = [line for line in options.prompts_file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--prompts {options.prompts_file}: {error.strerror}") from None
    if len(lines) < load.num_prompts:
        raise ConfigError(
            f"--prompts {options.prompts_file}: {len(lines)} lines, --num-prompts asks for "
            f"{load.num_prompts}"
        )
    tokenizer = find_tokenizer(config)
    return [list(tokenizer.encode(line)) for line in lines[: load.num_prompts]]
