"""The Merkle tree of the log (RFC 6962, RFC 9162): growing it, and proofs about it; no I/O.

Leaves are given as their `leaf_hash` throughout. What a verifier needs lives in `verify`, which stands alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from falaj.governance.audit.verify import (
    fold,
    grow,
    leaf_hash,
    node_hash,
    verify_consistency,
    verify_inclusion,
)

__all__ = [
    "Frontier",
    "consistency_proof",
    "inclusion_proof",
    "leaf_hash",
    "node_hash",
    "verify_consistency",
    "verify_inclusion",
]


class Frontier(NamedTuple):
    """A tree of `size` leaves, kept as the roots of its complete subtrees, largest first."""

    size: int = 0
    roots: tuple[bytes, ...] = ()

    def append(self, leaf: bytes) -> Frontier:
        size, roots = self
        return Frontier(size + 1, grow(size, roots, leaf))

    def extend(self, leaves: Iterable[bytes]) -> Frontier:
        """The same as many appends, and faster."""
        size, roots = self.size, list(self.roots)
        for leaf in leaves:
            rest = size
            while rest & 1:
                leaf = sha256(b"\x01" + roots.pop() + leaf).digest()
                rest >>= 1
            roots.append(leaf)
            size += 1
        return Frontier(size, tuple(roots))

    def root(self) -> bytes:
        return fold(self.roots)

    def to_text(self) -> str:
        return f"{self.size}:{b''.join(self.roots).hex()}"

    @classmethod
    def from_text(cls, text: str) -> Frontier:
        """The frontier that `to_text` wrote; ValueError for any other text."""
        match = re.fullmatch("(0|[1-9][0-9]{0,18}):((?:[0-9a-f]{64})*)", text)
        if match is None or len(match[2]) != 64 * int(match[1]).bit_count():
            raise ValueError("this is not the text of a frontier")
        raw = bytes.fromhex(match[2])
        return cls(int(match[1]), tuple(raw[at : at + 32] for at in range(0, len(raw), 32)))


def inclusion_proof(leaves: Sequence[bytes], index: int, size: int) -> list[bytes]:
    """The path that proves leaf `index` in the tree of the first `size` leaves, from the leaf up."""
    if not 0 <= index < size <= len(leaves):
        raise ValueError(f"leaf {index} of {size} is not among {len(leaves)} leaves")
    path, start, end = [], 0, size
    while end - start > 1:
        half = start + _split(end - start)
        if index < half:
            path.append(_root(leaves[half:end]))
            end = half
        else:
            path.append(_root(leaves[start:half]))
            start = half
    return path[::-1]


def consistency_proof(leaves: Sequence[bytes], old_size: int, new_size: int) -> list[bytes]:
    """The path that proves: the tree of `new_size` leaves begins with the tree of `old_size` leaves."""
    if not 0 <= old_size <= new_size <= len(leaves):
        raise ValueError(f"sizes {old_size} and {new_size} do not fit {len(leaves)} leaves")
    if old_size in (0, new_size):
        return []
    path, start, end = [], 0, new_size
    while end != old_size:
        half = start + _split(end - start)
        if old_size <= half:
            path.append(_root(leaves[half:end]))
            end = half
        else:
            path.append(_root(leaves[start:half]))
            start = half
    if start > 0:  # otherwise the old root itself is the node where the path begins
        path.append(_root(leaves[start:end]))
    return path[::-1]


def _split(size: int) -> int:
    """The leaves in the left subtree: the largest power of two below `size`."""
    return 1 << (size - 1).bit_length() - 1


def _root(leaves: Iterable[bytes]) -> bytes:
    return Frontier().extend(leaves).root()
