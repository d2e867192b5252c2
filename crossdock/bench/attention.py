"""`bench attention`: attention without its projections, by whoever can: our kernels over a BF16 and
an FP8 cache, and FlashInfer's."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Literal

from crossdock.bench import figures
from crossdock.bench.ranks import Ranks
from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.bench.stats import percentile
from crossdock.core import ConfigError, GQASpec, MLASpec

COPY = "copy"
FP8 = "Triton, FP8 cache"
HEAD, LATENT, ROTATED = 128, 512, 64
"""Widths of a head, and of MLA's latents and rotated keys: DeepSeek's."""


@dataclass(frozen=True)
class Shape:
    """`sequences` that ask with one row each of `length` cached ones ("decode"), or with all of
    theirs ("prompt"). kv_heads: 0 for MLA."""

    rows: Literal["decode", "prompt"]
    heads: int
    kv_heads: int
    sequences: int
    length: int

    def __str__(self) -> str:
        kind = f"gqa-{self.heads}/{self.kv_heads}" if self.kv_heads else f"mla-{self.heads}"
        return f"{self.rows}:{kind}:{self.sequences}x{self.length}"

    @property
    def spec(self) -> GQASpec | MLASpec:
        if self.kv_heads:
            return GQASpec(self.heads, self.kv_heads, HEAD)
        return MLASpec(self.heads, None, LATENT, HEAD, ROTATED, HEAD)

    @property
    def flops(self) -> int:
        """Of scores and sums, as far as they are seen; decodes of MLA over the latents."""
        width = HEAD if self.kv_heads or self.rows == "prompt" else LATENT
        widths = 2 * width + (0 if self.kv_heads else ROTATED)
        seen = self.length if self.rows == "decode" else self.length * (self.length + 1) // 2
        return 2 * widths * self.heads * self.sequences * seen

    def kv_bytes(self, fp8: bool) -> int:
        """Of all that is cached, scales included."""
        a_token = self.spec.kv_width + 4 * self.spec.kv_scales if fp8 else 2 * self.spec.kv_width
        return self.sequences * self.length * a_token


SHAPES = (
    "decode:gqa-32/4:128x4096,decode:mla-16:128x4096,decode:mla-32:128x4096,decode:mla-64:128x4096,"
    "decode:mla-128:128x4096,prompt:gqa-32/4:4x2048,prompt:gqa-32/4:1x8192,prompt:mla-16:4x2048"
)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """A comma list of ROWS:KIND:SEQUENCESxLENGTH."""
    try:
        return tuple(_parse(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--shapes {text!r}: expected ROWS:KIND:SEQUENCESxLENGTH, several with commas, ROWS "
            "decode or prompt, KIND mla-HEADS or gqa-HEADS/KV, such as decode:gqa-32/4:128x4096"
        ) from None


def _parse(text: str) -> Shape:
    rows, kind, numbers = text.split(":")
    name, _, heads = kind.partition("-")
    of_queries, of_keys = (int(n) for n in (heads if name == "gqa" else f"{heads}/0").split("/"))
    shape = Shape(rows, of_queries, of_keys, *(int(n) for n in numbers.split("x")))  # type: ignore[arg-type]
    known = rows in ("decode", "prompt") and name in ("gqa", "mla")
    if not known or min(shape.heads, shape.sequences, shape.length) < 1:
        raise ValueError(text)
    if name == "gqa" and (of_keys < 1 or of_queries % of_keys):
        raise ValueError(text)
    return shape


@dataclass(frozen=True)
class AttentionOptions:
    """`reps`: of each turn."""

    device: str
    shapes: tuple[Shape, ...] = parse_shapes(SHAPES)
    page_size: int = 16
    reps: int = 5
    turns: int = 15


@dataclass(frozen=True)
class Measured:
    """By who: `times[who][kind]` in us; `errors`: norm of the difference to float32 over float32's;
    `laid_out_us`: what the host took before the kernels. `refused`: who could not run, and why."""

    times: dict[str, dict[str, list[float]]]
    errors: dict[str, float]
    laid_out_us: dict[str, float]
    refused: dict[str, str]


@dataclass(frozen=True)
class AttentionRun:
    """`copied`: bytes that the copy reads and writes."""

    options: AttentionOptions
    device: str
    copied: int
    measured: dict[Shape, Measured]


def run_attention(
    options: AttentionOptions, on_progress: Callable[[str], None] = lambda what: None
) -> AttentionRun:
    """
    Raises:
        CrossdockError: a result is wrong.
    """
    measured = {}
    with ExitStack() as stack:
        on_progress("starting")
        ranks = Ranks("crossdock.bench.attention_rank", 1, options.device, {}, stack)
        facts = ranks.facts[0]
        for shape in options.shapes:
            on_progress(f"{shape}: checking and timing")
            request = {
                **asdict(shape),
                "page_size": options.page_size,
                "turns": options.turns,
                "reps": options.reps,
            }
            (answer,) = ranks.ask(request)
            measured[shape] = Measured(**{**answer, "times": dict(answer["times"])})
    device = facts["device"] or f"{cpu_name()}, Triton's interpreter"
    return AttentionRun(options, device, facts["copied"], measured)


METHOD = (
    "Median and quartiles of graph replays (of several repetitions, flushes of L2 subtracted). "
    "kv_read: bytes of what is cached, scales included, over the time; kv_read_share: of the rate "
    "of a large copy, read and written, eagerly in the same turns. Decodes of MLA work on the "
    "latents, prompts on expanded keys and values; prompts over an FP8 cache gather it within "
    "their time. error: of all rows, norm of the difference to float32 attention over the BF16 "
    "keys and values, over its norm. Pages are in random order. "
    "lay_out_us: of the host, before the kernels."
)


def report(run: AttentionRun, command: str) -> Report:
    cases = [case for shape in run.measured for case in _cases(run, shape)]
    refused = {str(shape): found.refused for shape, found in run.measured.items() if found.refused}
    notes = {"method": METHOD, "page_size": run.options.page_size, "refused": refused}
    return Report(command, run.device, tuple(cases), notes)


def _cases(run: AttentionRun, shape: Shape) -> Iterator[Case]:
    found = run.measured[shape]
    spent = {who: kinds.get("graph") or kinds["eager"] for who, kinds in found.times.items()}
    copy_rate = run.copied / percentile(spent.pop(COPY), 50) / 1e6
    rates = {who: [shape.flops / us / 1e6 for us in values] for who, values in spent.items()}
    medians = {who: percentile(values, 50) for who, values in rates.items()}
    asked = "H200" in run.device
    for who, values in rates.items():
        others = {other: median for other, median in medians.items() if other != who}
        at = {"variant": f"{who}, {shape}", **asdict(shape)}
        more = {"us": percentile(spent[who], 50), "lay_out_us": found.laid_out_us[who]}
        target = figures.ATTENTION_TFLOPS.get(str(shape)) if asked and who != FP8 else None
        yield case_of(
            "arithmetic", values, "TFLOP/s", "higher", at, against=others, target=target, more=more
        )
        if shape.rows == "decode":
            read = [shape.kv_bytes(who == FP8) / us / 1e6 for us in spent[who]]
            yield case_of("kv_read", read, "TB/s", "higher", at, against={COPY: copy_rate})
            share = [100 * rate / copy_rate for rate in read]
            target = figures.KV_READ_SHARES.get(str(shape)) if asked and who != FP8 else None
            yield case_of("kv_read_share", share, "%", "higher", at, target=target)
        yield case_of("error", [found.errors[who]], "of norm", "lower", at)
