"""One part of a checkpoint as self-verifying bytes that are never executed. Standard library only.

magic (8) | length of the header (8, little-endian) | sha256 of the header (32) | header | pieces of tensors
The header is JSON, padded with spaces: the step, the save and the number of the part, and for each piece the tensor,
its offsets and its sha256. A piece is raw little-endian memory at a multiple of 64 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from falaj.training.runtime.checkpointing.storage.store import Bytes, SaveId
from falaj.training.runtime.errors import CheckpointDamaged

MAGIC = b"FALAJPT1"
ALIGNMENT = 64
PREFIX_BYTES = len(MAGIC) + 8 + 32


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor, and the place of its bytes in a part."""

    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    part: int
    at: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class PartSummary:
    """The entry of a part in the manifest."""

    size_bytes: int
    head_bytes: int
    head_sha256: str


@dataclass(frozen=True)
class TensorChunk:
    """A chunk of a tensor and its bytes, before it has a place in a part."""

    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: memoryview


def encode_part(
    save_id: SaveId, number: int, boxes: Sequence[TensorChunk]
) -> tuple[list[Bytes], list[StoredChunk], PartSummary]:
    """Return the bytes of a part, its chunks and its summary. The bytes are views of the chunks' memory."""
    rows, data, at = list[tuple[Any, ...]](), list[Bytes](), 0
    for box in boxes:
        rows.append((box.tensor, box.offsets, box.sizes, at, len(box.data), sha256(box.data).hexdigest()))
        data += [box.data, bytes(-len(box.data) % ALIGNMENT)]
        at += len(box.data) + len(data[-1])
    head = _head(save_id, number, rows)
    start = len(head)
    pieces = [
        StoredChunk(name, offsets, sizes, number, start + place, size, digest)
        for name, offsets, sizes, place, size, digest in rows
    ]
    return [head, *data], pieces, PartSummary(start + at, start, sha256(head).hexdigest())


def verify_head(data: Bytes, *, save_id: SaveId, number: int, facts: PartSummary) -> None:
    """Raise CheckpointDamaged if the header of a part is truncated, altered or of another part."""
    if sha256(data).hexdigest() == facts.head_sha256:
        return
    found = _read_head(bytes(data), number)
    stated = found.get("step"), found.get("save"), found.get("part")
    if stated != (save_id.step, save_id.save, number):
        raise CheckpointDamaged(f"its part {number} is part {stated[2]} of a save of step {stated[0]}")
    raise CheckpointDamaged(f"the header of its part {number} is truncated or altered")


def _read_head(data: bytes, number: int) -> dict[str, Any]:
    text = data[PREFIX_BYTES : PREFIX_BYTES + int.from_bytes(data[8:16], "little")]
    if not data.startswith(MAGIC) or sha256(text).digest() != data[16:PREFIX_BYTES]:
        raise CheckpointDamaged(f"the header of its part {number} is truncated or altered")
    found: dict[str, Any] = json.loads(text)
    return found


def _head(save_id: SaveId, number: int, rows: Sequence[Sequence[Any]]) -> bytes:
    named = {"step": save_id.step, "save": save_id.save, "part": number, "pieces": rows}
    text = json.dumps(named).encode()
    text += b" " * (-(PREFIX_BYTES + len(text)) % ALIGNMENT)
    return MAGIC + len(text).to_bytes(8, "little") + sha256(text).digest() + text
