"""Processes that train together, forked from one that has loaded torch, which takes the longest."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

Said = dict[str, Any]


def gang(
    processes: int,
    act: Callable[[int], Any],
    folder: Path,
    *,
    together: bool = False,
    within_s: int = 300,
) -> list[Any]:
    """What `act` of its rank says in each process; none of one that did not end by itself, and in time.

    `together`: where one dies the others go too, as under torchrun, and none has said anything.
    """
    said = [folder / f"{rank}.json" for rank in range(processes)]
    for each in said:
        each.unlink(missing_ok=True)
    store, place = meeting_place(processes)
    ranks = {fork(rank, act, place, each, within_s) for rank, each in enumerate(said)}
    died = False
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and together and not died:
            died = True
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    del store
    return [None if died or not each.exists() else json.loads(each.read_text()) for each in said]


def meeting_place(processes: int) -> tuple[TCPStore | None, dict[str, str]]:
    """A store of this process at a port that nobody else has, and the variables that tell of it; none for one alone."""
    if processes == 1:
        return None, {}
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(processes)}
    return store, here | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def fork(rank: int, act: Callable[[int], Any], place: dict[str, str], said: Path, within_s: int) -> int:
    if pid := os.fork():
        return pid
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(within_s)  # who hangs dies
        os.dup2(2, 1)  # what a run says is not what comes of it
        os.environ |= place | ({"RANK": str(rank)} if place else {})
        said.write_text(json.dumps(act(rank)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
