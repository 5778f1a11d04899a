"""Concurrent operations neither starve nor block each other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from platforms import OwnPlatform

PATIENCE_S = 5.0
"""The controller's lease: a controller that cannot write for longer loses it."""


def test_operations_that_read_twice_do_not_block_each_other(platform: OwnPlatform) -> None:
    platform.workspaces.create("team-a")

    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        proofs = list(pool.map(lambda _: platform.audit.inclusion_proof(1), range(8)))

    assert {proof.index for proof in proofs} == {1}
    assert time.monotonic() - began < PATIENCE_S


def test_a_thread_that_writes_without_pause_does_not_starve_another(platform: OwnPlatform) -> None:
    enough = threading.Event()

    def write() -> None:
        for number in count():
            if enough.is_set():
                return
            platform.groups.create(f"busy-{number}")

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(write)
        began = time.monotonic()
        try:
            for number in range(5):
                platform.workspaces.create(f"patient-{number}")
        finally:
            took = time.monotonic() - began
            enough.set()
        busy.result()

    assert took < PATIENCE_S
