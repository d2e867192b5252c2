"""Bytes of rows sent, by the path they take."""

from collections.abc import Sequence

from crossdock.core import Topology


class PathBytes:
    """ "self": rows that stay; "node": to ranks of the same host; "remote": to others."""

    def __init__(self, rank: int, topology: Topology):
        self._path_R = [
            "self" if r == rank else "node" if topology.same_node(rank, r) else "remote"
            for r in range(topology.size)
        ]
        self._totals = {"self": 0, "node": 0, "remote": 0}

    def add(self, rows_R: Sequence[int], row_bytes: int) -> None:
        totals = self._totals
        for path, rows in zip(self._path_R, rows_R, strict=True):
            totals[path] += rows * row_bytes

    def totals(self) -> dict[str, int]:
        return dict(self._totals)
