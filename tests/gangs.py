"""Gangs of processes that train together, forked from one that has imported the modules they need."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
"""Modules that a step would otherwise import in each process."""


def run_gang(
    processes: int,
    act: Callable[[int], Any],
    folder: Path,
    *,
    together: bool = False,
    within_s: int = 90,
) -> list[Any]:
    """Return what `act` returns in each rank; None for one that did not end by itself in time.

    With `together`, the others end when one dies, as under torchrun, and all return None.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    report = [folder / f"{rank}.json" for rank in range(processes)]
    for each in report:
        each.unlink(missing_ok=True)
    store, place = start_store(processes, within_s)
    ranks = {fork(rank, act, place, each, within_s) for rank, each in enumerate(report)}
    died = False
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and together and not died:
            died = True
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    if store is not None:
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
    return [None if died or not each.exists() else json.loads(each.read_text()) for each in report]


def start_store(processes: int, within_s: int) -> tuple[int | None, dict[str, str]]:
    """Start the rendezvous store, and return its process and the variables that name it.

    It is a separate process: a store has threads, beside which no other process must be forked.
    """
    if processes == 1:
        return None, {}
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(within_s)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        signal.pause()
        os._exit(0)
    os.close(writing)
    port = os.read(reading, 100).decode()
    os.close(reading)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
    return pid, here | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def fork(rank: int, act: Callable[[int], Any], place: dict[str, str], report: Path, within_s: int) -> int:
    if pid := os.fork():
        return pid
    try:
        faulthandler.dump_traceback_later(within_s, exit=True)  # a hung process dumps its stack and ends
        os.dup2(2, 1)  # the output of a run is not its result
        os.environ |= place | ({"RANK": str(rank)} if place else {})
        report.write_text(json.dumps(act(rank)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
