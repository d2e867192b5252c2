"""`bench soak`: minutes of mixed requests, more than there is room for; what is left of them."""

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from crossdock.bench.report import Case, Report, case_of, cpu_name
from crossdock.core import CrossdockError, SamplingParams
from crossdock.launch import LLM

_ABORTED = 0.05
"""Of all requests."""
_SAMPLES = 40
"""Of memory and KV use, over the run."""
_WORDS_S = 5.0
"""Between two of progress."""
_DRAIN_S = 120.0
_PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 40, "seed": 7},
    {"temperature": 0.7, "repetition_penalty": 1.1},
    {"temperature": 0.0, "logprobs": 2},
)


@dataclass(frozen=True)
class SoakOptions:
    """`in_flight`: requests open at once, per attention group. Lengths: the longest drawn.
    `settings`: fields of `EngineConfig`."""

    model: str
    ranks: int
    minutes: float
    in_flight: int
    input_len: int
    output_len: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Soak:
    """`samples`: one dict per look at the ranks. `ended`: requests by how they ended."""

    options: SoakOptions
    seconds: float = 0.0
    submitted: int = 0
    tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)
    last: list[dict[str, Any]] = field(default_factory=list)
    info: list[dict[str, Any]] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return self.submitted - sum(self.ended.values())


def run_soak(options: SoakOptions, on_progress: Callable[[str], None] = lambda what: None) -> Soak:
    """
    Raises:
        CrossdockError: the engine failed; what it had answered until then is in the message.
    """
    soak = Soak(options)
    on_progress("starting")
    with LLM(options.model, options.ranks, **options.settings) as llm:
        soak.info = llm.client.info
        _Traffic(llm, soak).run(on_progress)
    return soak


class _Traffic:
    def __init__(self, llm: LLM, soak: Soak):
        self._client, self._soak = llm.client, soak
        self._draw, self._names = random.Random(0), itertools.count()
        self._changed = threading.Condition()
        self._open: dict[str, int] = {}
        """Request to tokens after which it is aborted; -1: never."""
        self._seen: Counter[str] = Counter()
        self._tokens = 0

    def run(self, on_progress: Callable[[str], None]) -> None:
        soak, client = self._soak, self._client
        most = soak.options.in_flight * client.config.groups
        begin = time.monotonic()
        end, each = begin + soak.options.minutes * 60, soak.options.minutes * 60 / _SAMPLES
        next_look, next_word = begin + each, begin + _WORDS_S
        while (now := time.monotonic()) < end:
            if client.failure is not None:
                raise CrossdockError(f"{client.failure} (after {dict(soak.ended)})")
            with self._changed:
                missing = most - len(self._open)
                if missing <= 0:
                    self._changed.wait(min(0.1, end - now))
            for _ in range(missing):
                self._submit()
            if now >= next_look:
                next_look += each
                soak.samples.append({"seconds": now - begin, "ranks": self._look()})
            if now >= next_word:
                next_word += _WORDS_S
                on_progress(f"{now - begin:.0f} s, {sum(soak.ended.values())} requests ended")
        with self._changed:
            soak.seconds, soak.tokens = time.monotonic() - begin, self._tokens
            self._changed.wait_for(lambda: not self._open, timeout=_DRAIN_S)
        soak.last = self._look()

    def _submit(self) -> None:
        draw, options, client = self._draw, self._soak.options, self._client
        long = round(options.input_len ** draw.random())  # as many of each magnitude
        prompt = [draw.randrange(client.spec.vocab_size) for _ in range(max(1, long))]
        wanted = draw.randint(1, options.output_len)
        params = SamplingParams(max_tokens=wanted, ignore_eos=True, **draw.choice(_PARAMS))  # type: ignore[arg-type]
        name = f"soak-{next(self._names)}"
        with self._changed:
            self._open[name] = draw.randrange(wanted) if draw.random() < _ABORTED else -1
            self._soak.submitted += 1
        client.submit(name, prompt, params, partial(self._listen, name))

    def _listen(self, name: str, update: Any) -> None:
        with self._changed:
            if name not in self._open:
                return
            self._tokens += len(update.token_ids)
            self._seen[name] += len(update.token_ids)
            how = update.finish_reason
            if how is None and 0 <= self._open[name] <= self._seen[name]:
                how = "aborted"
                self._client.abort(name)
            if how is not None:
                self._soak.ended[how] += 1
                del self._open[name], self._seen[name]
                self._changed.notify_all()

    def _look(self) -> list[dict[str, Any]]:
        return [s.values for s in self._client.snapshots(timeout=30.0)]


def report(soak: Soak, command: str) -> Report:
    options = soak.options
    shape = {
        "ranks": options.ranks, "minutes": options.minutes, "in_flight": options.in_flight,
        "input_len": [1, options.input_len], "output_len": [1, options.output_len],
    }  # fmt: skip
    schedulers = [rank["scheduler"] for rank in soak.last if "scheduler" in rank]
    used = [
        rank["scheduler"]["kv_cache_usage_perc"]
        for sample in soak.samples
        for rank in sample["ranks"]
        if "scheduler" in rank
    ]
    preempted = sum(s["num_preemptions_total"] for s in schedulers)
    counts = {"ended": dict(soak.ended), "submitted": soak.submitted, "preemptions": preempted}
    errors = soak.ended.get("error", 0)
    cases = [
        _one("requests_lost", soak.lost + errors, "requests", shape, 0.0, counts),
        _one("pages_not_returned", sum(s["pages_used"] for s in schedulers), "pages", shape, 0.0),
        case_of("kv_cache_used", used, "share", "higher", shape),
        *(_growth(soak, what, shape) for what in ("rss_bytes", "device_bytes")),
        case_of("output_throughput", [soak.tokens / soak.seconds], "tokens/s", "higher", shape),
    ]
    device = str(soak.info[0].get("device", "cpu"))
    made = tuple(case for case in cases if case is not None)
    named = _device_name(device, options.ranks)
    return Report(command, named, made, {"settings": options.settings})


def _one(
    name: str, value: float, unit: str, shape: dict[str, Any], target: float, more: Any = None
) -> Case:
    return case_of(name, [value], unit, "lower", shape, target=target, more=more or {})


def _growth(soak: Soak, what: str, shape: dict[str, Any]) -> Case | None:
    """Of each rank, from the second quarter of the run to the last."""
    series = [[rank.get(what) for rank in sample["ranks"]] for sample in soak.samples]
    if len(series) < 4 or None in series[0]:
        return None
    quarter = len(series) // 4
    early, late = series[quarter : 2 * quarter], series[-quarter:]
    grown = [
        (sum(b) / len(b) - sum(a) / len(a)) / 2**20
        for a, b in zip(zip(*early, strict=True), zip(*late, strict=True), strict=True)
    ]
    last = [round(value / 2**20, 1) for value in series[-1]]
    name = f"growth_of_{what.removesuffix('_bytes')}"
    return case_of(name, grown, "MiB", "lower", shape, more={"last_mib": last})


def _device_name(device: str, ranks: int) -> str:
    if not device.startswith("cuda"):
        return cpu_name()
    import torch

    return f"{ranks} x {torch.cuda.get_device_name(torch.device(device))}"
