"""Sketches at rest. They hold values of the data, so they are sealed under the keys of the endpoint's workspace."""

from __future__ import annotations

import zlib
from typing import TypeVar

from falaj.governance.encryption.values import SealedValues
from falaj.monitoring.sketches.sketchers import decode, encode
from falaj.records.monitoring.sketches import ReferenceSketch, SketchSet, WindowSketch

SIZE_LIMIT = 512 * 2**20
"""What a sealed value may unpack to: far beyond what a window can hold."""

Set = TypeVar("Set", bound=SketchSet)


class SketchStore:
    """Seals and opens sketches of one workspace; a sealed sketch cannot be moved to another place."""

    def __init__(self, sealed: SealedValues, workspace: str) -> None:
        self._sealed = sealed
        self._workspace = workspace

    def seal_window(self, window: WindowSketch, *, endpoint: str, seq: int) -> bytes:
        return self._seal(window, f"slot/{endpoint}/{window.model}/{seq}")

    def open_window(self, sealed: bytes, *, endpoint: str, version: str, seq: int) -> WindowSketch:
        return self._open(sealed, f"slot/{endpoint}/{version}/{seq}", WindowSketch)

    def seal_reference(self, reference: ReferenceSketch, *, monitor: str, version: str = "") -> bytes:
        """`version`: of its own reference; without it, of the pinned training set."""
        return self._seal(reference, f"reference/{monitor}/{version}")

    def open_reference(self, sealed: bytes, *, monitor: str, version: str = "") -> ReferenceSketch:
        return self._open(sealed, f"reference/{monitor}/{version}", ReferenceSketch)

    def _seal(self, sketches: SketchSet, context: str) -> bytes:
        packed = zlib.compress(encode(sketches), level=1)  # undoes base64, and little more
        return self._sealed.seal(self._workspace, packed, context=context.encode())

    def _open(self, sealed: bytes, context: str, kind: type[Set]) -> Set:
        packed = self._sealed.unseal(self._workspace, bytes(sealed), context=context.encode())
        return decode(zlib.decompressobj().decompress(packed, SIZE_LIMIT), kind)
