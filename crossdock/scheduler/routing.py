"""Which attention group gets a request: the one that holds its prefix, unless it is busy."""

import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crossdock.scheduler.pages import extend_digests, root_digest

GAIN = 3
"""Tokens of load that one token of prefill saved outweighs. At 1 a second request with the prefix
of a first would leave it: in its group the prefix counts twice, as KV and as queued."""

TYPICAL_OUTPUT = 256
"""Outputs are reserved up to here; most requests stop long before their max_tokens."""


@dataclass(frozen=True)
class GroupLoad:
    """`kv_tokens`: KV that the open requests of a group hold or will hold, shared prefixes once.
    `queued_tokens`: prompt tokens it has yet to compute."""

    requests: int = 0
    kv_tokens: int = 0
    queued_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.kv_tokens + self.queued_tokens


def choose_group(
    loads: Sequence[GroupLoad], cached_tokens: Sequence[int], max_num_seqs: int
) -> int:
    """The group with the longest cached prefix, if what that saves is worth its load; else the
    least loaded one. Groups with all places taken come last. Ties: fewer requests, lower index.

    Args:
        cached_tokens: per group, prompt tokens that it need not compute.
    """
    groups = [g for g, load in enumerate(loads) if load.requests < max_num_seqs]
    groups = groups or list(range(len(loads)))
    least = min(groups, key=lambda g: (loads[g].tokens, loads[g].requests, g))
    best = min(groups, key=lambda g: (-cached_tokens[g], loads[g].tokens, loads[g].requests, g))
    saved = cached_tokens[best] - cached_tokens[least]
    return best if loads[best].tokens - loads[least].tokens <= GAIN * saved else least


class _LeastLoaded:
    """The groups with a place left, least loaded first, in O(log groups) a change.

    A heap of (tokens, requests, group): every change adds an entry, those of earlier loads are
    passed over.
    """

    def __init__(self, loads: Sequence[GroupLoad], max_num_seqs: int):
        self._loads = loads
        self._max_num_seqs = max_num_seqs
        self._heap: list[tuple[int, int, int]] = []
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(load.tokens, load.requests, g) for g, load in enumerate(self._loads)]
        heapq.heapify(self._heap)

    def changed(self, group: int) -> None:
        load = self._loads[group]
        heapq.heappush(self._heap, (load.tokens, load.requests, group))
        if len(self._heap) > 4 * len(self._loads) + 64:
            self._rebuild()

    def first(self) -> int | None:
        """None where all places are taken."""
        while self._heap:
            tokens, requests, group = self._heap[0]
            load = self._loads[group]
            current = (load.tokens, load.requests) == (tokens, requests)
            if current and requests < self._max_num_seqs:
                return group
            heapq.heappop(self._heap)  # a full group comes back with its next change
        return None


class PrefixIndex:
    """Digests of the pages that a group was sent, least recently sent forgotten first."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def match(self, digests: Sequence[bytes]) -> int:
        """How many leading pages are there."""
        for count, digest in enumerate(digests):
            if digest not in self._digests:
                return count
        return len(digests)

    def insert(self, digests: Sequence[bytes]) -> None:
        for digest in reversed(digests):  # the first page is forgotten last
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self.capacity:
            self._digests.popitem(last=False)


class Router:
    """Keeps the loads of the groups, which change with `route`, `started` and `release` at once: a
    burst spreads without waiting for news of the ranks.

    Args:
        namespace: as the scheduler's.
        kv_pages: pages of one group's KV; older prefixes are taken as evicted.
    """

    def __init__(
        self,
        num_groups: int,
        *,
        page_size: int,
        max_num_seqs: int,
        namespace: str = "",
        kv_pages: int = 16384,
        prefix_caching: bool = True,
    ):
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self._caching = prefix_caching
        self._root = root_digest(namespace)
        self._index = [PrefixIndex(kv_pages) for _ in range(num_groups)]
        self._loads = [GroupLoad() for _ in range(num_groups)]
        self._open: dict[str, tuple[int, GroupLoad]] = {}
        self._least = _LeastLoaded(self._loads, max_num_seqs)

    def resize(self, kv_pages: int) -> None:
        """As `kv_pages`, where that is known later."""
        for index in self._index:
            index.capacity = kv_pages

    @property
    def num_open(self) -> int:
        """Requests that were routed and not yet released."""
        return len(self._open)

    @property
    def loads(self) -> tuple[GroupLoad, ...]:
        return tuple(self._loads)

    def page_digests(self, tokens: Sequence[int]) -> list[bytes]:
        """What `route` looks `tokens` up by, and what takes most of its time. Changes nothing."""
        digests: list[bytes] = []
        if self._caching:
            extend_digests(digests, tokens, self.page_size, self._root)
        return digests

    def route(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_tokens: int,
        digests: Sequence[bytes] | None = None,
    ) -> int:
        """The group for a request; counted there until `release`.

        Args:
            tokens: prompt and, where a request is resumed, the tokens emitted so far.
            digests: their `page_digests`, where several requests share them.
        """
        if request_id in self._open:
            raise ValueError(f"request {request_id!r} is already routed")
        if digests is None:
            digests = self.page_digests(tokens)
        usable = digests[: (len(tokens) - 1) // self.page_size] if tokens else []
        cached = {}
        if usable:
            matches = enumerate(index.match(usable) for index in self._index)
            cached = {g: pages * self.page_size for g, pages in matches if pages}
        group = self._choose(cached)
        self._index[group].insert(digests)
        new = len(tokens) - cached.get(group, 0)
        share = GroupLoad(1, new + min(max_tokens, TYPICAL_OUTPUT), new)
        self._open[request_id] = group, share
        self._count(group, share, 1)
        return group

    def _choose(self, cached: Mapping[int, int]) -> int:
        """`choose_group` without a look at every group. `cached`: of groups with any."""
        least = self._least.first()
        if least is None or cached:
            groups = list(range(len(self._loads))) if least is None else sorted({least, *cached})
            loads = [self._loads[g] for g in groups]
            tokens = [cached.get(g, 0) for g in groups]
            return groups[choose_group(loads, tokens, self.max_num_seqs)]
        return least

    def started(self, request_id: str) -> None:
        """Its first token came: its prompt is no longer queued."""
        if request_id in self._open:
            group, share = self._open[request_id]
            self._count(group, GroupLoad(0, 0, share.queued_tokens), -1)
            self._open[request_id] = group, GroupLoad(1, share.kv_tokens, 0)

    def release(self, request_id: str) -> None:
        """It ended, however. Ids that are not open are ignored."""
        if request_id in self._open:
            group, share = self._open.pop(request_id)
            self._count(group, share, -1)

    def _count(self, group: int, share: GroupLoad, sign: int) -> None:
        load = self._loads[group]
        self._loads[group] = GroupLoad(
            load.requests + sign * share.requests,
            load.kv_tokens + sign * share.kv_tokens,
            load.queued_tokens + sign * share.queued_tokens,
        )
        self._least.changed(group)
