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
"""What a step would load, in each process anew."""


def run_gang(
    processes: int,
    act: Callable[[int], Any],
    folder: Path,
    *,
    together: bool = False,
    within_s: int = 90,
) -> list[Any]:
    """What `act` of its rank says in each process; none of one that did not end by itself, and in time.

    `together`: where one dies the others go too, as under torchrun, and none has said anything.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    said = [folder / f"{rank}.json" for rank in range(processes)]
    for each in said:
        each.unlink(missing_ok=True)
    keeper, place = start_store(processes, within_s)
    ranks = {fork(rank, act, place, each, within_s) for rank, each in enumerate(said)}
    died = False
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and together and not died:
            died = True
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    if keeper is not None:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)
    return [None if died or not each.exists() else json.loads(each.read_text()) for each in said]


def start_store(processes: int, within_s: int) -> tuple[int | None, dict[str, str]]:
    """Who keeps the store where they meet, at a port that nobody else has, and the variables that tell of it.

    It is a process of its own: a store has threads, beside which no other process must be forked.
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


def fork(rank: int, act: Callable[[int], Any], place: dict[str, str], said: Path, within_s: int) -> int:
    if pid := os.fork():
        return pid
    try:
        faulthandler.dump_traceback_later(within_s, exit=True)  # who hangs says where, and ends
        os.dup2(2, 1)  # what a run says is not what comes of it
        os.environ |= place | ({"RANK": str(rank)} if place else {})
        said.write_text(json.dumps(act(rank)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
