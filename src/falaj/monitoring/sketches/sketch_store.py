"""Encryption of stored sketches. They contain data values, so the keys of the endpoint's workspace encrypt them."""

from __future__ import annotations

import zlib
from typing import TypeVar

from falaj.governance.encryption.values import SealedValues
from falaj.monitoring.sketches.sketchers import decode, encode
from falaj.records.monitoring.sketches import ReferenceSketch, SketchSet, WindowSketch

SIZE_LIMIT = 512 * 2**20
"""Largest decompressed size: far beyond that of any window."""

Set = TypeVar("Set", bound=SketchSet)


class SketchStore:
    """Encrypts and decrypts sketches of one workspace, bound to where they are stored."""

    def __init__(self, sealed: SealedValues, workspace: str) -> None:
        self._sealed = sealed
        self._workspace = workspace

    def seal_window(self, window: WindowSketch, *, endpoint: str, seq: int) -> bytes:
        return self._seal(window, f"slot/{endpoint}/{window.model}/{seq}")

    def open_window(self, sealed: bytes, *, endpoint: str, version: str, seq: int) -> WindowSketch:
        return self._open(sealed, f"slot/{endpoint}/{version}/{seq}", WindowSketch)

    def seal_reference(self, reference: ReferenceSketch, *, monitor: str, version: str = "") -> bytes:
        """Encrypt the own reference of `version`, or without it the pinned training set."""
        return self._seal(reference, f"reference/{monitor}/{version}")

    def open_reference(self, sealed: bytes, *, monitor: str, version: str = "") -> ReferenceSketch:
        return self._open(sealed, f"reference/{monitor}/{version}", ReferenceSketch)

    def _seal(self, sketches: SketchSet, context: str) -> bytes:
        packed = zlib.compress(encode(sketches), level=1)  # mostly undoes base64
        return self._sealed.seal(self._workspace, packed, context=context.encode())

    def _open(self, sealed: bytes, context: str, kind: type[Set]) -> Set:
        packed = self._sealed.unseal(self._workspace, bytes(sealed), context=context.encode())
        return decode(zlib.decompressobj().decompress(packed, SIZE_LIMIT), kind)
