"""The structure of an LMDB file, checked before LMDB follows it: LMDB trusts its pages, and a bad one ends the process.

LMDB reads the offsets, sizes and page numbers in a page as they are: a flipped bit in them is a read outside of the map
(SIGSEGV, SIGBUS) or a failed assertion. This module walks the same trees with bounds, from its own map of the file. It
knows the format of LMDB 0.9 (`MDB_page`, `MDB_node`, `MDB_meta` in mdb.c), on machines that are little-endian and have
64 bits. The values themselves have checksums (`records`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from falaj.drivers.lmdb import records

HEADER_BYTES = 16
NODE_BYTES = 8
BRANCH, LEAF, OVERFLOW, META, DIRTY = 1, 2, 4, 8, 0x10
BIG_DATA = 1
NO_PAGE = 2**64 - 1
MAX_DEPTH = 32
LEAVES_AT_ONCE = 4096
"""Pages that are checked together; it takes some hundred bytes of memory for each of their values."""

_PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_DB = struct.Struct("<IHHQQQQQ")


class PageTree(NamedTuple):
    """The root of a tree, and its depth."""

    root: int
    depth: int


class FileState(NamedTuple):
    """A state of a file: its transaction, its last page, and the trees of free pages and of values."""

    transaction: int
    last_page: int
    trees: tuple[PageTree, PageTree]


def check_pages(path: Path, environment: Any) -> None:
    """Raise Damaged if LMDB could not read the newest state of the file without leaving its pages."""
    import numpy as np

    page_bytes = environment.stat()["psize"]
    content = np.memmap(path, np.uint8, "r").data
    while True:
        with environment.begin() as transaction:  # its pages are not used again while it is open
            state = _state(content, page_bytes, transaction.id())
            if state is None:
                continue  # others have committed twice since it began
            for tree in state.trees:
                _Walk(content, page_bytes, state.last_page).check(tree)
            return


def _state(content: memoryview, page_bytes: int, transaction: int) -> FileState | None:
    for number in (0, 1):
        start = number * page_bytes + HEADER_BYTES
        trees = [_DB.unpack_from(content, start + 24 + _DB.size * each) for each in (0, 1)]
        last_page, found = struct.unpack_from("<QQ", content, start + 24 + 2 * _DB.size)
        if found == transaction:
            free, values = (PageTree(root=each[7], depth=each[2]) for each in trees)
            return FileState(found, last_page, (free, values))
    return None


class _Walk:
    """Visits every page of a tree once."""

    def __init__(self, content: memoryview, page_bytes: int, last_page: int) -> None:
        self._content = content
        self._page_bytes = page_bytes
        self._last_page = last_page
        self._seen: set[int] = set()

    def check(self, tree: PageTree) -> None:
        if tree.root == NO_PAGE:
            return
        if not 0 < tree.depth <= MAX_DEPTH:
            raise records.damaged(f"a tree of depth {tree.depth}")
        level = [tree.root]
        for _ in range(tree.depth - 1):
            level = [child for page in level for child in self._branch(page)]
        for page in level:
            self._page_start(page)
        for first in range(0, len(level), LEAVES_AT_ONCE):
            self._leaves(level[first : first + LEAVES_AT_ONCE])

    def _branch(self, page: int) -> Iterator[int]:
        start = self._page_start(page)
        number, _, flags, lower, upper = _PAGE.unpack_from(self._content, start)
        if number != page or flags & ~DIRTY != BRANCH:
            raise records.damaged(f"page {page} has the number {number} and the kind {flags}")
        count = (lower - HEADER_BYTES) // 2
        if not HEADER_BYTES < lower <= upper <= self._page_bytes or count < 2:
            raise self._beyond(page)
        for offset in struct.unpack_from(f"<{count}H", self._content, start + HEADER_BYTES):
            if not HEADER_BYTES <= offset <= self._page_bytes - NODE_BYTES or offset & 1:
                raise self._beyond(page)
            low, high, upper, key_bytes = _NODE.unpack_from(self._content, start + offset)
            if offset + NODE_BYTES + key_bytes > self._page_bytes:
                raise self._beyond(page)
            yield low | high << 16 | upper << 32

    def _leaves(self, pages: Sequence[int]) -> None:
        """Check pages with values, all at once: most pages are such."""
        import numpy as np

        words, limit = np.frombuffer(self._content, "<u2"), self._page_bytes
        numbers = np.array(pages, np.int64)
        starts = numbers * (limit // 2)
        stored = np.frombuffer(self._content, "<u8")[numbers * (limit // 8)]
        flags, lower, upper = (words[starts + place].astype(np.int64) for place in (5, 6, 7))
        bad = (stored != numbers.astype(np.uint64)) | (flags & ~DIRTY != LEAF) | (lower <= HEADER_BYTES)
        self._refuse(numbers[bad | (lower > upper) | (upper > limit) | (lower & 1 == 1)])
        counts = (lower - HEADER_BYTES) // 2
        owners = np.repeat(np.arange(len(pages)), counts)
        places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = words[starts[owners] + HEADER_BYTES // 2 + places].astype(np.int64)
        bad = (offsets < HEADER_BYTES) | (offsets > limit - NODE_BYTES) | (offsets & 1 == 1)
        self._refuse(numbers[owners[bad]])
        nodes = starts[owners] + offsets // 2
        low, high, kinds, keys = (words[nodes + place].astype(np.int64) for place in range(4))
        sizes, is_big = low | high << 16, kinds == BIG_DATA
        ends = offsets + NODE_BYTES + keys + np.where(is_big, 8, sizes)
        self._refuse(numbers[owners[(kinds > BIG_DATA) | (ends > limit)]])
        for node in np.flatnonzero(is_big):
            page = int(numbers[owners[node]])
            self._overflow(page, page * limit + int(ends[node]) - 8, int(sizes[node]))

    def _refuse(self, pages: Any) -> None:
        if len(pages):
            raise self._beyond(int(pages[0]))

    def _overflow(self, page: int, place: int, size: int) -> None:
        """Check the pages that hold a value which does not fit into one."""
        (first,) = struct.unpack_from("<Q", self._content, place)
        start = self._page_start(first)
        number, _, flags, count = struct.unpack_from("<QHHI", self._content, start)
        held = count * self._page_bytes - HEADER_BYTES
        if (
            number != first
            or flags & ~DIRTY != OVERFLOW
            or size > held
            or first + count - 1 > self._last_page
        ):
            raise records.damaged(f"page {first}, to which page {page} leads, does not hold its value")

    def _page_start(self, page: int) -> int:
        """Return where a page begins. Raise Damaged if there is none, or if it was visited before."""
        start = page * self._page_bytes
        if not 1 < page <= self._last_page or start + self._page_bytes > len(self._content):
            raise records.damaged(f"a link to page {page} of {self._last_page}")
        if page in self._seen:
            raise records.damaged(f"two links to page {page}")
        self._seen.add(page)
        return start

    def _beyond(self, page: int) -> Exception:
        return records.damaged(f"page {page} is not a page of values, or has some outside of it")
