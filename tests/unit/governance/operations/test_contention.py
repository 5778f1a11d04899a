"""Concurrent operations neither starve nor block each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from platforms import OwnPlatform
from polling import eventually

MANY = 500


def test_operations_that_read_twice_do_not_block_each_other(platform: OwnPlatform) -> None:
    platform.workspaces.create("team-a")

    with ThreadPoolExecutor(8) as pool:
        proofs = list(pool.map(lambda _: platform.audit.inclusion_proof(1), range(8)))

    assert {proof.index for proof in proofs} == {
        1
    }  # where they wait for each other, they are refused as busy


def test_a_thread_that_writes_without_pause_does_not_starve_another(platform: OwnPlatform) -> None:
    enough, written = threading.Event(), list[int]()

    def write() -> None:
        for number in range(MANY):
            if enough.is_set():
                return
            platform.groups.create(f"busy-{number}")
            written.append(number)

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(write)
        try:
            eventually(lambda: written)
            for number in range(5):
                platform.workspaces.create(f"patient-{number}")
        finally:
            enough.set()
        busy.result()

    assert len(written) < MANY
