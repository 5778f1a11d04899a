"""A hash chain over the training samples: equal heads prove that no sample was lost or repeated."""

from __future__ import annotations

import ctypes
import struct
from hashlib import sha256

from torch import Tensor

from falaj.training.runtime.data.batches import BatchPlan

_GENESIS = sha256(b"falaj.training.ledger.1").digest()
_number = struct.Struct("<q").pack


class SampleLedger:
    """head(n) = sha256(head(n-1), n, the sample indices of step n as little-endian int64)."""

    def __init__(self, head: str | None = None) -> None:
        self._head = bytes.fromhex(head) if head else _GENESIS

    @property
    def head(self) -> str:
        return self._head.hex()

    def add(self, step: int, indices: Tensor) -> None:
        """Add the samples of `step`: contiguous int64 on the CPU."""
        samples = ctypes.string_at(indices.data_ptr(), indices.numel() * 8)
        self._head = sha256(self._head + _number(step) + samples).digest()


def expected_head(plan: BatchPlan, steps: int) -> str:
    """Return the head after `steps` steps, computed from the batch plan alone."""
    ledger = SampleLedger()
    for step in range(1, steps + 1):
        ledger.add(step, plan.indices(step))
    return ledger.head
