"""From curves of single instances to a deployment: how many of which, for both phases."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from crossdock.core import CapacityError, ModelSpec
from crossdock.planner.hardware import Hardware
from crossdock.planner.layout import Layout, Workload
from crossdock.planner.search_deployment import FULL, Deployment, Side
from crossdock.planner.search_failure import require_fit, why_none
from crossdock.planner.search_points import (
    WORTH,
    Curve,
    Fit,
    Point,
    Pricing,
    decode_curve,
    prefill_curve,
    steady_sequences,
    within_limit,
)
from crossdock.planner.search_space import Formats, layouts


@dataclass(frozen=True)
class Found:
    """`ranked`: deployments, best first, one for each pair of instance sizes. `priced`: points."""

    ranked: tuple[Deployment, ...]
    prefill: tuple[Curve, ...]
    decode: tuple[Curve, ...]
    priced: int


Progress = Callable[[int, int], None]
Allowed = Callable[[Layout], bool]


def search(
    spec: ModelSpec,
    hardware: Hardware,
    work: Workload,
    pricing: Pricing,
    formats: Formats,
    gpus: int,
    *,
    allowed: Allowed = lambda _: True,
    split: bool = True,
    tie: float = 0.0,
    on_progress: Progress = lambda _done, _total: None,
) -> Found:
    """All deployments on at most `gpus` GPUs.

    Without `work.request_rate` the one that serves most wins; with it the one with fewest GPUs.
    Those within the share `tie` of it are equal, for all that the cost model can tell; of them only
    those with room in memory (`ROOMY`) stay, of these those within half of `tie`, and of these the
    ones with most tokens per second and user, again to within `tie`; then throughput decides.

    Raises:
        CapacityError: none serves the workload within its limits; says which number is short.
    """
    tasks = [
        (role, layout)
        for role in ("prefill", "decode")
        for layout in layouts(spec, hardware, gpus, role, formats)
        if allowed(layout)
    ]
    made: dict[str, list[Curve]] = {"prefill": [], "decode": []}
    unfit: list[tuple[Layout, Fit]] = []
    for done, (role, layout) in enumerate(tasks):
        on_progress(done, len(tasks))
        curve = (prefill_curve if role == "prefill" else decode_curve)(pricing, layout, work)
        if isinstance(curve, Fit):
            unfit.append((layout, curve))
        else:
            limited = (
                curve if role == "prefill" else within_limit(pricing, curve, work, work.tpot_s)
            )
            made[role].append(limited)
    on_progress(len(tasks), len(tasks))
    require_fit(made, unfit, work, gpus)
    prefill, decode = made["prefill"], made["decode"]

    def deployments(work: Workload) -> Iterator[Deployment]:
        yield from _together(prefill, decode, pricing, work, gpus)
        if split:
            yield from _split(prefill, decode, work, gpus, transfer_s(spec, hardware))

    found = list(deployments(work))
    if not found:
        held = any(True for _ in deployments(replace(work, ttft_s=None, tpot_s=None)))
        raise CapacityError(why_none(made, work, gpus, split, held))
    priced = sum(len(curve.points) for curves in made.values() for curve in curves)
    return Found(_rank(found, work, tie), tuple(prefill), tuple(decode), priced)


def transfer_s(spec: ModelSpec, hardware: Hardware) -> Callable[[Workload, Layout], float]:
    """Seconds that a prompt's KV takes from prefill to decode, alone on its GPU's link."""
    link = hardware.outer or hardware.inner

    def seconds(work: Workload, layout: Layout) -> float:
        kv_bytes = work.isl * spec.kv_bytes_per_token(layout.kv_dtype)
        return link.latency_s + kv_bytes / link.bytes_per_s

    return seconds


def _split(
    prefill: Sequence[Curve],
    decode: Sequence[Curve],
    work: Workload,
    gpus: int,
    transfer: Callable[[Workload, Layout], float],
) -> Iterator[Deployment]:
    moved_s = transfer(work, prefill[0].layout)
    ttft_s = None if work.ttft_s is None else work.ttft_s - moved_s
    prefills, decodes = _by_size(prefill, ttft_s), _by_size(decode, work.tpot_s)
    for p_choice in prefills:
        for d_choice in decodes:
            if p_choice.best.layout.experts != d_choice.best.layout.experts:
                continue
            for instances in _shares(p_choice.best, d_choice.best, work, gpus):
                made = _deployment(p_choice, d_choice, instances, work, moved_s)
                if made.overloaded or work.ttft_s is None or made.ttft_s <= work.ttft_s:
                    yield made


@dataclass(frozen=True)
class Choice:
    """The curves of all layouts of one size, and the fastest point within the limit."""

    curves: tuple[Curve, ...]
    curve: Curve
    best: Point


def _by_size(curves: Sequence[Curve], limit_s: float | None) -> list[Choice]:
    sizes: dict[tuple[int, str], list[Curve]] = {}
    for curve in curves:
        sizes.setdefault((curve.layout.gpus, curve.layout.experts), []).append(curve)
    choices = []
    for group in sizes.values():
        within = [(point, curve) for curve in group if (point := curve.best(limit_s))]
        if within:
            enough = (1 - WORTH) * max(point.requests_per_gpu_s for point, _ in within)
            best, curve = min(
                (pair for pair in within if pair[0].requests_per_gpu_s >= enough),
                key=lambda pair: _plainness(pair[0]),
            )
            choices.append(Choice(tuple(group), curve, best))
    return choices


def _plainness(point: Point) -> tuple:
    layout = point.layout
    return layout.tp, layout.redundant_per_rank, -point.requests_per_gpu_s


def _shares(p: Point, d: Point, work: Workload, gpus: int) -> Iterator[tuple[int, int]]:
    """Numbers of prefill and decode instances worth a look."""
    p_size, d_size = p.layout.gpus, d.layout.gpus
    p_rate, d_rate = p.requests_per_gpu_s * p_size, d.requests_per_gpu_s * d_size
    if work.request_rate is not None:
        least_p, least_d = (_enough(work.request_rate, r) for r in (p_rate, d_rate))
        if least_p * p_size + least_d * d_size <= gpus:
            most_p = min(2 * least_p, (gpus - least_d * d_size) // p_size)
            # More than enough prefill shortens the queue before it.
            yield from ((n, least_d) for n in _rising(least_p, most_p))
            return
    ideal = gpus * d.requests_per_gpu_s / (p.requests_per_gpu_s + d.requests_per_gpu_s) / p_size
    for n_prefill in {max(1, math.floor(ideal) + k) for k in (-1, 0, 1, 2)}:
        n_decode = (gpus - n_prefill * p_size) // d_size
        if n_decode >= 1:
            fewer = max(1, math.ceil(n_decode * d_rate / p_rate))  # enough prefill, no more
            least = max(1, math.ceil(n_prefill * p_rate / d_rate))
            yield min(n_prefill, fewer), min(n_decode, least)


def _enough(rate: float, instance_rate: float) -> int:
    return max(1, math.ceil(rate / FULL / instance_rate))


def _rising(least: int, most: int) -> Iterator[int]:
    """From `least` to `most` in steps of a tenth."""
    n = least
    while n <= most:
        yield n
        n += max(1, n // 10)


def _deployment(
    prefill: Choice, decode: Choice, instances: tuple[int, int], work: Workload, moved_s: float
) -> Deployment:
    """Decode at the least latency, in whatever layout of its size, that carries what prefill lets
    through."""
    (n_p, n_d), p, d = instances, prefill.best, decode.best
    p_gpus, d_gpus = n_p * p.layout.gpus, n_d * d.layout.gpus
    p_rate, d_rate = p.requests_per_gpu_s * p_gpus, d.requests_per_gpu_s * d_gpus
    capacity = min(p_rate, d_rate)
    rate = _carried(capacity, work)
    curves = [curve for curve in decode.curves if curve.layout.tp == d.layout.tp]
    carrying = [curve.carrying(rate / d_gpus) for curve in curves]
    at = min(
        (point for point in carrying if point.requests_per_gpu_s * d_gpus >= rate),
        key=lambda point: point.latency_s,
        default=d,
    )
    queue_s = _queue_s(rate / p_rate, p) if work.request_rate is not None else 0.0
    return Deployment(
        kind="split",
        prefill=Side(p, n_p, rate / p_rate, prefill.curve.bound(p, work.ttft_s, "TTFT"), p.batch),
        decode=Side(at, n_d, rate / d_rate, _decode_bound(decode, at, work), d.batch),
        gpus=p_gpus + d_gpus,
        capacity=capacity,
        rate=rate,
        ttft_s=p.latency_s + moved_s + queue_s,
        tpot_s=at.latency_s,
        overloaded=work.request_rate is not None and rate < work.request_rate,
    )


def _queue_s(load: float, p: Point) -> float:
    """Mean wait of an M/D/1 queue at an attention group, whose service is its share of a step."""
    service_s = 1 / (p.requests_per_gpu_s * p.layout.tp)
    return load / (2 * (1 - load)) * service_s


def _decode_bound(decode: Choice, at: Point, work: Workload) -> str:
    if at.requests_per_gpu_s < decode.best.requests_per_gpu_s:
        return f"arrivals: a larger batch, up to {decode.best.batch:,.0f}, would wait for requests"
    return decode.curve.bound(at, work.tpot_s, "TPOT")


def _carried(capacity: float, work: Workload) -> float:
    return capacity if work.request_rate is None else min(work.request_rate, FULL * capacity)


def _together(
    prefill: Sequence[Curve],
    decode: Sequence[Curve],
    pricing: Pricing,
    work: Workload,
    gpus: int,
) -> Iterator[Deployment]:
    """Both phases on the same instances, prefill steps between decode steps; the best batch pair
    of each (size, tp, replicas)."""
    by_shape: dict[tuple, tuple[list[Curve], list[Curve]]] = {}
    for which, curves in enumerate((prefill, decode)):
        for curve in curves:
            by_shape.setdefault(_shape(curve.layout), ([], []))[which].append(curve)
    for (size, *_), (p_curves, d_curves) in by_shape.items():
        n = gpus // size
        if not n:
            continue
        decodes = _quickest(d_curves)
        options = [
            made
            for p_curve, p in _quickest(p_curves)
            for d_curve, d in decodes
            if (made := _shared_instances(p_curve, p, d_curve, d, n, work))
        ]
        options.sort(key=lambda o: (o.gpus, -o.capacity) if work.request_rate else -o.capacity)
        yield from islice((o for o in options if _holds(pricing, o, work)), 1)


def _quickest(curves: Sequence[Curve]) -> list[tuple[Curve, Point]]:
    """For each batch the mode and overlap with the shortest step."""
    best: dict[float, tuple[Curve, Point]] = {}
    for curve in curves:
        for point in curve.points:
            known = best.get(point.batch)
            if known is None or point.latency_s < known[1].latency_s:
                best[point.batch] = curve, point
    return list(best.values())


def _shape(layout: Layout) -> tuple[int, int, str, int]:
    return layout.gpus, layout.tp, layout.experts, layout.redundant_per_rank


def _shared_instances(
    p_curve: Curve, p: Point, d_curve: Curve, d: Point, most: int, work: Workload
) -> Deployment | None:
    """All of them, or as few as keep the limits at a rate; None where none do."""
    tpot_s = _mixed_tpot_s(p, d, work)
    if work.tpot_s is not None and tpot_s > work.tpot_s:
        return None
    numbers: Iterable[int] = (most,)
    if work.request_rate is not None:
        rate = d.batch / (tpot_s * work.osl) * p.layout.gpus
        least = min(most, _enough(work.request_rate, rate))
        numbers = _rising(least, min(most, 2 * least))
    for n in numbers:
        made = _shared(p_curve, p, d_curve, d, n, work)
        if made.overloaded or work.ttft_s is None or made.ttft_s <= work.ttft_s:
            return made
    return None


def _shared(
    p_curve: Curve, p: Point, d_curve: Curve, d: Point, n: int, work: Workload
) -> Deployment:
    tpot_s, size = _mixed_tpot_s(p, d, work), p.layout.gpus
    ttft_s = p.latency_s + d.step.total
    capacity = d.batch / (tpot_s * work.osl) * n * size
    rate = _carried(capacity, work)
    load = rate / capacity
    if work.request_rate is not None:
        ttft_s += _queue_s(load, p)
    return Deployment(
        kind="together",
        prefill=Side(p, n, load, p_curve.bound(p, work.ttft_s, "TTFT"), p.batch),
        decode=Side(d, n, load, _together_bound(p, d_curve, d, work), d.batch),
        gpus=n * size,
        capacity=capacity,
        rate=rate,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        overloaded=work.request_rate is not None and rate < work.request_rate,
    )


def _mixed_tpot_s(p: Point, d: Point, work: Workload) -> float:
    """In the time of `osl` decode steps, each sequence's successor is prefilled."""
    return d.step.total + d.batch * work.isl * p.step.total / p.batch / work.osl


def _together_bound(p: Point, curve: Curve, d: Point, work: Workload) -> str:
    larger = [point for point in curve.points if point.batch > d.batch]
    if not larger:
        return curve.end
    tpot_s = _mixed_tpot_s(p, larger[0], work)
    if work.tpot_s is not None and tpot_s > work.tpot_s:
        return (
            f"TPOT, prefill steps between: {larger[0].batch:,.4g} would take {tpot_s * 1e3:,.1f} "
            f"ms, limit {work.tpot_s * 1e3:,.0f} ms"
        )
    if larger[0].batch / tpot_s > d.batch / _mixed_tpot_s(p, d, work):
        return f"KV memory: {larger[0].batch:,.4g} have none beside prefill's buffers"
    return f"throughput: {larger[0].batch:,.4g} would not be faster"


def _holds(pricing: Pricing, made: Deployment, work: Workload) -> bool:
    """Whether one GPU holds both phases' buffers and KV."""
    p, d = made.prefill.point, made.decode.point
    fit = pricing.fit(replace(p.layout, role="both"))
    kv_tokens = fit.kv_tokens
    if d.layout.mode != p.layout.mode:  # the low-latency buffers lie beside the others
        small = replace(d.layout, mode="normal")
        kv_tokens -= pricing.fit(small).kv_tokens - pricing.fit(d.layout).kv_tokens
    left = max(0.0, kv_tokens - p.batch * p.layout.tp)  # prompts that are being computed
    steady = steady_sequences(int(left // (work.isl + work.osl)))
    return not fit.short_bytes and d.batch * d.layout.tp <= steady


def _rank(found: Iterable[Deployment], work: Workload, tie: float) -> tuple[Deployment, ...]:
    """The chosen one, then the others by merit; of each kind and pair of sizes the best alone."""

    def merit(d: Deployment) -> float:
        return d.capacity if work.request_rate is None or d.overloaded else 1 / d.gpus

    def order(d: Deployment) -> tuple:
        return d.overloaded, -round(merit(d), 9), d.tpot_s, d.gpus

    best: dict[tuple, Deployment] = {}
    for made in sorted(found, key=order):
        sizes = made.prefill.point.layout.gpus, made.decode.point.layout.gpus
        best.setdefault((made.kind, made.experts, *sizes), made)
    ranked = list(best.values())
    top = next((d for d in ranked if d.experts == "ep"), ranked[0])
    equal = [
        d
        for d in ranked
        if (d.experts, d.overloaded) == (top.experts, top.overloaded)
        and merit(d) >= merit(top) * (1 - tie)
    ]
    roomy = [d for d in equal if d.roomy] or equal
    close = [d for d in roomy if merit(d) >= merit(roomy[0]) * (1 - tie / 2)]
    quick = min(d.tpot_s for d in close) / (1 - tie)
    chosen = next(d for d in close if d.tpot_s <= quick)
    return (chosen, *(d for d in ranked if d is not chosen))
