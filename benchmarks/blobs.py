"""Throughput of encrypted blobs, against the same local driver without encryption.

256 MiB are written with fsync, and read from the page cache, so that the disk does not hide the difference.
`blobs.upload` also computes a SHA-256, beside either driver. Figures are MiB/s.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from falaj.drivers.objectstore.blobs import local_blobs
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.encryption.digest import RunningDigest
from falaj.governance.encryption.frames import DataKey
from falaj.ports.blobs import BlobKey
from harness import Result, Rule, report, say

QUICK = True
ROUNDS = 7
SIZE_MIB = 256
CHUNK = 1 << 20
GOAL, RULE = 0.6, Rule.RATIO_AT_LEAST


class OneKey:
    """One data key, without a key service."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)

    def current(self, workspace: str) -> DataKey:
        return DataKey(1, self._secret)

    def version(self, workspace: str, version: int) -> bytes:
        return self._secret


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="blobs-") as folder:
        rates = measure(Path(folder))
    pairs = {
        "written": ("encrypted write", "plain write"),
        "written and hashed": ("encrypted write, hashed", "plain write, hashed"),
        "read": ("encrypted read", "plain read"),
    }
    results = [
        Result(f"MiB/s, {SIZE_MIB} MiB {what}", median(rates[ours]), median(rates[plain]), GOAL, RULE)
        for what, (ours, plain) in pairs.items()
    ]
    report("blobs", results)


def measure(folder: Path) -> dict[str, list[float]]:
    """Return MiB/s of each round, in alternation; the first round is a warm-up."""
    store = local_blobs(folder)
    encrypted = EncryptedBlobs(store, OneKey())
    ours, plain, hashed, both = (BlobKey(name) for name in ("ours", "plain", "hashed", "both"))
    content = [os.urandom(CHUNK) for _ in range(SIZE_MIB)]
    work: dict[str, Callable[[], object]] = {
        "encrypted write": lambda: encrypted.write("w", ours, content),
        "plain write": lambda: store.write(plain, content),
        "encrypted write, hashed": lambda: encrypted.write("w", both, RunningDigest().follow(content)),
        "plain write, hashed": lambda: store.write(hashed, RunningDigest().follow(content)),
        "encrypted read": lambda: drain(encrypted.read("w", ours)),
        "plain read": lambda: drain(store.read(plain)),
    }
    rates: dict[str, list[float]] = {name: [] for name in work}
    for number in range(ROUNDS + 1):
        for key in (ours, plain, hashed, both):
            store.delete(key)
        found = {name: rate(action) for name, action in work.items()}
        say(f"round {number}  " + ", ".join(f"{name} {figure:.0f}" for name, figure in found.items()))
        for name, figure in found.items() if number else ():
            rates[name].append(figure)
    return rates


def rate(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return SIZE_MIB / (time.perf_counter() - started)


def drain(chunks: Iterator[bytes]) -> None:
    size = sum(len(chunk) for chunk in chunks)
    if size != SIZE_MIB * CHUNK:
        raise RuntimeError(f"{size} bytes came back")


if __name__ == "__main__":
    main()
