"""Whose turn it is: down the tree of queues, at each level the branch with the lowest score."""

from __future__ import annotations

from heapq import heappop, heappush

from falaj.scheduling.capacity.quota_tree import QuotaNode

Entry = tuple[float, str, int]


class FairOrder:
    """The queues that wait for a turn. What a branch holds changes its score; an older entry is then passed over."""

    def __init__(self) -> None:
        self._tops: list[tuple[Entry, QuotaNode]] = []
        self._heaps: dict[str, list[tuple[Entry, QuotaNode]]] = {}
        self._open: dict[str, int] = {}
        self._stamps: dict[str, int] = {}

    def join(self, leaf: QuotaNode) -> None:
        for branch in leaf.path:
            waiting = self._open.get(branch.name, 0)
            self._open[branch.name] = waiting + 1
            if not waiting:
                self._enter(branch)

    def leave(self, leaf: QuotaNode) -> None:
        for branch in leaf.path:
            self._open[branch.name] -= 1

    def changed(self, leaf: QuotaNode) -> None:
        """What the leaf holds has changed."""
        for branch in leaf.path:
            if self._open.get(branch.name):
                self._enter(branch)

    def first(self) -> QuotaNode | None:
        branch = self._lowest(self._tops)
        while branch is not None and branch.children:
            branch = self._lowest(self._heaps[branch.name])
        return branch

    def _enter(self, branch: QuotaNode) -> None:
        stamp = self._stamps[branch.name] = self._stamps.get(branch.name, 0) + 1
        heap = self._tops if branch.parent is None else self._heaps.setdefault(branch.parent.name, [])
        heappush(heap, ((branch.score, branch.name, stamp), branch))

    def _lowest(self, heap: list[tuple[Entry, QuotaNode]]) -> QuotaNode | None:
        while heap:
            (_, name, stamp), branch = heap[0]
            if stamp == self._stamps[name] and self._open[name]:
                return branch
            heappop(heap)
        return None
