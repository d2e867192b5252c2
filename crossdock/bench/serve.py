"""`bench serve`: a load over HTTP against any server with OpenAI's completions."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

from crossdock.bench.report import Case, Report, cpu_name
from crossdock.bench.sse_client import Client, HTTPFailure
from crossdock.bench.stats import LoadResult, RequestRecord, load_result, spread
from crossdock.bench.target import Target, discover
from crossdock.bench.workload import Prompt, arrival_times, random_prompts, read_sharegpt
from crossdock.core import ConfigError, CrossdockError

Lengths = tuple[int, int]
MS = 1e3


@dataclass(frozen=True)
class ServeOptions:
    """`concurrency` (closed loop, several for a sweep) or `request_rate` (Poisson) drives the load.

    `slo`: seconds by name, for goodput and as the targets of those medians.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    concurrency: tuple[int, ...] = ()
    request_rate: float = float("inf")
    input_lens: tuple[Lengths, ...] = ((128, 128),)
    output_lens: tuple[Lengths, ...] = ((64, 64),)
    num_prompts: int = 100
    dataset: str = "random"
    warmup: int = 4
    slo: dict[str, float] | None = None
    seed: int = 0


@dataclass(frozen=True)
class Point:
    """One load of a sweep. `concurrency` None: arrivals at `rate`."""

    concurrency: int | None
    rate: float
    input_len: Lengths
    output_len: Lengths

    @property
    def load(self) -> str:
        return f"{self.rate:g}/s" if self.concurrency is None else f"{self.concurrency}"


@dataclass(frozen=True)
class PointResult:
    point: Point
    result: LoadResult
    errors: tuple[str, ...]
    client_cpu: float
    """Cores that this load generator itself used."""


@dataclass(frozen=True)
class ServeRun:
    options: ServeOptions
    target: Target
    points: tuple[PointResult, ...]

    @property
    def failures(self) -> int:
        return sum(p.result.failures for p in self.points)


OnProgress = Callable[[int, int], None]
"""(requests ended, requests in all)"""


def run_load(options: ServeOptions, on_progress: OnProgress = lambda done, total: None) -> ServeRun:
    """Runs every point of the sweep. Failed requests are counted, not raised.

    Raises:
        ConfigError: options that do not go together.
        CrossdockError: no server answers at the URL.
    """
    if options.concurrency and options.request_rate != float("inf"):
        raise ConfigError("--concurrency and --request-rate exclude each other: give one of them")
    return asyncio.run(_run_load(options, on_progress))


async def _run_load(options: ServeOptions, on_progress: OnProgress) -> ServeRun:
    client = Client(options.url, options.api_key)
    try:
        target = await discover(client, options.model)
        points = [
            Point(concurrency, options.request_rate, input_len, output_len)
            for input_len, output_len, concurrency in product(
                options.input_lens, options.output_lens, options.concurrency or (None,)
            )
        ]
        total, results = len(points) * options.num_prompts, []
        for index, point in enumerate(points):
            done = index * options.num_prompts
            seed = f"{options.seed}/{index}"  # prompts of one point are no cached prefix of another
            prompts = await _prompts(client, target, options, point, seed)
            warm, measured = prompts[: options.warmup], prompts[options.warmup :]
            await _drive(client, target, warm, point, seed, lambda: None)
            ended = count(done + 1)

            def on_end(ended: Iterator[int] = ended) -> None:
                on_progress(next(ended), total)

            results.append(await _measure(client, target, measured, point, options, seed, on_end))
        return ServeRun(options, target, tuple(results))
    except HTTPFailure as error:
        raise CrossdockError(f"{options.url}: {error}") from None
    finally:
        await client.close()


async def _prompts(
    client: Client, target: Target, options: ServeOptions, point: Point, seed: str
) -> list[Prompt]:
    wanted = options.num_prompts + options.warmup
    if options.dataset == "random":
        return random_prompts(wanted, point.input_len, point.output_len, target.vocabulary, seed)
    kind, _, path = options.dataset.partition(":")
    if kind != "sharegpt" or not path:
        raise ConfigError(f"--dataset {options.dataset!r}: expected random or sharegpt:FILE")
    prompts: list[Prompt] = []
    conversations = read_sharegpt(Path(path), seed)
    for conversation in conversations:
        if len(prompts) == wanted:
            return prompts
        ids = await _tokenize(client, target, conversation.prompt)
        answer = await _tokenize(client, target, conversation.answer)
        fits = target.max_model_len is None or len(ids) + len(answer) <= target.max_model_len
        if ids and answer and fits:
            prompts.append(Prompt(tuple(ids), len(answer)))
    if len(prompts) < wanted:
        raise ConfigError(
            f"--dataset {path}: {len(prompts)} of {len(conversations)} entries fit the model's "
            f"context; --num-prompts and --warmup ask for {count} together"
        )
    return prompts


async def _tokenize(client: Client, target: Target, text: str) -> list[int]:
    answer = await client.json("POST", "/tokenize", {"model": target.model, "prompt": text})
    return list(answer["tokens"])


async def _measure(
    client: Client,
    target: Target,
    prompts: list[Prompt],
    point: Point,
    options: ServeOptions,
    seed: str,
    on_end: Callable[[], None],
) -> PointResult:
    start, cpu = time.perf_counter(), time.process_time()
    records = await _drive(client, target, prompts, point, seed, on_end)
    duration = time.perf_counter() - start
    return PointResult(
        point,
        load_result(records, duration, options.slo),
        tuple(dict.fromkeys(r.error for r in records if r.error)),
        (time.process_time() - cpu) / duration,
    )


async def _drive(
    client: Client,
    target: Target,
    prompts: list[Prompt],
    point: Point,
    seed: str,
    on_end: Callable[[], None],
) -> list[RequestRecord]:
    """Sends every prompt; one record each, in the order they ended."""
    records: list[RequestRecord] = []

    async def one(prompt: Prompt, delay: float = 0.0) -> None:
        if delay:
            await asyncio.sleep(delay)
        records.append(await _request(client, target, prompt))
        on_end()

    async def worker(queue: Iterable[Prompt]) -> None:
        for prompt in queue:
            await one(prompt)

    async with asyncio.TaskGroup() as group:
        if point.concurrency is None:
            for prompt, at in zip(
                prompts, arrival_times(len(prompts), point.rate, seed), strict=True
            ):
                group.create_task(one(prompt, at))
        else:
            queue = iter(prompts)  # shared: each worker takes the next one when it is free
            for _ in range(point.concurrency):
                group.create_task(worker(queue))
    return records


async def _request(client: Client, target: Target, prompt: Prompt) -> RequestRecord:
    """One streamed completion of exactly `output_len` tokens. Errors end up in the record."""
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": list(prompt.token_ids),
        "max_tokens": prompt.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": target.stream_options,
    }
    start = time.perf_counter()
    chunks: list[tuple[float, int]] = []  # (when, tokens so far; 0: not told)
    total = 0
    try:
        async with aclosing(client.events("/v1/completions", body)) as events:
            async for event in events:
                told = (event.get("usage") or {}).get("completion_tokens", 0)
                total = max(total, told)
                if any(choice.get("text") or told for choice in event.get("choices", ())):
                    chunks.append((time.perf_counter(), told))
    except HTTPFailure as error:
        now = time.perf_counter()
        return RequestRecord(len(prompt.token_ids), start, (), now, str(error))
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        now = time.perf_counter()
        return RequestRecord(len(prompt.token_ids), start, (), now, f"malformed event: {error!r}")
    end = time.perf_counter()
    arrivals = _arrivals(chunks, total)
    silence = None if arrivals else "no token came"
    return RequestRecord(len(prompt.token_ids), start, arrivals, end, silence)


def _arrivals(chunks: list[tuple[float, int]], total: int) -> tuple[tuple[float, int], ...]:
    """(when, new tokens) per chunk: exact where each one told, else the total spread over them."""
    if chunks and all(told for _, told in chunks):
        before = [0, *(told for _, told in chunks)]
        counts = [told - b for (_, told), b in zip(chunks, before, strict=False)]
    else:
        counts = spread(total or len(chunks), len(chunks)) if chunks else []
    return tuple((at, n) for (at, _), n in zip(chunks, counts, strict=True) if n > 0)


def report(run: ServeRun, command: str) -> Report:
    cases = [case for point in run.points for case in _cases(run, point)]
    points = [
        {
            "shape": _shape(run.options, p.point),
            "successes": p.result.successes,
            "failures": p.result.failures,
            "errors": list(p.errors[:5]),
            "duration_seconds": p.result.duration,
            "input_tokens": p.result.input_tokens,
            "output_tokens": p.result.output_tokens,
            "client_cores": p.client_cpu,
        }
        for p in run.points
    ]
    server = {"url": run.options.url, "model": run.target.model, **run.target.facts}
    device = run.target.facts.get("device", "cpu")
    notes = {"server": server, "seed": run.options.seed, "points": points}
    return Report(command, cpu_name() if device == "cpu" else device, tuple(cases), notes)


def _shape(options: ServeOptions, point: Point) -> dict[str, Any]:
    load: dict[str, Any] = (
        {"request_rate": "inf" if point.rate == float("inf") else point.rate}
        if point.concurrency is None
        else {"concurrency": point.concurrency}
    )
    shape = {**load, "num_prompts": options.num_prompts, "dataset": options.dataset}
    if options.dataset == "random":
        shape |= {"input_len": point.input_len, "output_len": point.output_len}
    return shape


def _cases(run: ServeRun, p: PointResult) -> list[Case]:
    result, shape = p.result, _shape(run.options, p.point)
    rates = {
        "request_throughput": (result.request_rate, "requests/s"),
        "input_throughput": (result.input_rate, "tokens/s"),
        "output_throughput": (result.output_rate, "tokens/s"),
    }
    if result.goodput is not None:
        rates["goodput"] = (result.goodput, "requests/s")
    devices = run.target.devices
    cases = [
        Case(
            name, shape, unit, "higher", rate, (rate, rate), 1,
            more={"per_device": rate / devices} if devices else {},
        )
        for name, (rate, unit) in rates.items()
    ]  # fmt: skip
    for name, values in result.latencies.items():
        low, high = result.quartiles[name]
        limit = (run.options.slo or {}).get(name)
        cases.append(
            Case(
                name, shape, "ms", "lower", values["median"] * MS, (low * MS, high * MS),
                result.counts[name],
                target=limit * MS if limit else None,
                more={k: values[k] * MS for k in ("mean", "p90", "p99")},
            )
        )  # fmt: skip
    return cases
