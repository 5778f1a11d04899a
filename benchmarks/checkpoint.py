"""Stall of a training loop per checkpoint of 1 GB, in one process and in two, against `torch.save` and `async_save`.

A stall is the time in which saving keeps the loop from computing: in the call, and before the next update. The time
until the checkpoint is durable is reported beside it; `torch.save` makes nothing durable.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard

from falaj.training.runtime.checkpointing.checkpointer import Checkpointer
from falaj.training.runtime.checkpointing.state import collect_state, local_tensor
from falaj.training.runtime.checkpointing.storage.folder import CheckpointFolder
from falaj.training.runtime.checkpointing.storage.store import Retention
from falaj.training.runtime.parallel.process_group import ProcessGroup
from harness import Result, report, say

ROUNDS = 4
LAYERS, WIDTH = 20, 2048  # 84 million parameters: 1.0 GB with the two moments of AdamW
BATCH = 8
GOAL = 0.1


class Loop:
    """Steps of a training, with a hook before each update."""

    def __init__(self, world: ProcessGroup) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.model: nn.Module = nn.Sequential(*layers)
        if world.size > 1:
            fully_shard(self.model)
        self.optimizer = optim.AdamW(self.model.parameters())
        self.rows = torch.randn(BATCH, WIDTH)
        self.before_update: Callable[[], None] = lambda: None

    def step(self) -> float:
        """Do a step, and return the seconds that it was stalled before its update."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(self.rows).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        self.before_update()
        stood = time.perf_counter() - began
        self.before_update = lambda: None
        self.optimizer.step()
        return stood


Save = Callable[[Loop, Path], tuple[Callable[[], None], Callable[[], None]]]
"""Begins a save; returns a wait for the next update, and one until the checkpoint is complete."""


def nothing() -> None:
    pass


def with_torch_save(loop: Loop, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Save the state of every process in a separate file."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    tensors = {
        name: local_tensor(each.detach())
        for name, each in collect_state(loop.model, loop.optimizer).tensors.items()
    }
    torch.save(tensors, folder / f"{rank}.pt")
    return nothing, nothing


def with_async_save(loop: Loop, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Save with the defaults; the write continues in a thread."""
    tensors = collect_state(loop.model, loop.optimizer).tensors
    writer = FileSystemWriter(folder / "dcp", overwrite=True)
    saved: Any = async_save(dict(tensors), storage_writer=writer, process_group=GROUP[0])
    return nothing, saved.result


GROUP: list[dist.ProcessGroup | None] = [None]
"""The group of the peer's thread, separate from that of the steps so that messages do not mix."""


class Ours:
    """A checkpointer as in `fit`, which reuses its memory from one checkpoint to the next."""

    def __init__(self, folder: Path, world: ProcessGroup) -> None:
        self._checkpointer = Checkpointer(CheckpointFolder(folder), world)
        self._number = 0

    def __call__(self, loop: Loop, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
        self._number += 1
        state = collect_state(loop.model, loop.optimizer)
        saving = self._checkpointer.save(state, step=self._number, run={}, retention=Retention(1))
        return saving.staging.wait, saving.written.result

    def close(self) -> None:
        self._checkpointer.close()


def measure(loop: Loop, save: Save, folder: Path) -> dict[str, float]:
    """Return the stall of one checkpoint, and the time until it is complete."""
    began = time.perf_counter()
    loop.before_update, finish = save(loop, folder)
    called = time.perf_counter() - began
    stood = loop.step()
    finish()
    kept = time.perf_counter() - began
    settle()
    return {"stall": called + stood, "kept": kept}


def settle() -> None:
    """Flush the disk, so that no measurement pays for the one before."""
    os.sync()
    if dist.is_initialized():
        dist.barrier()


def take_turns(world: ProcessGroup, folder: Path) -> dict[str, list[dict[str, float]]]:
    torch.set_num_threads(1)
    loop, ours = Loop(world), Ours(folder / "ours", world)
    loop.step()
    ways: dict[str, Save] = {"falaj": ours, "torch.save": with_torch_save, "async_save": with_async_save}
    for save in ways.values():
        measure(loop, save, folder)  # first touch of the memory
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        names = list(ways)[number % 3 :] + list(ways)[: number % 3]
        for name in names:
            found[name].append(measure(loop, ways[name], folder))
    ours.close()
    return found


# ------------------------------------------------------------------------------------------ processes


def in_processes(count: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Return what the first of `count` processes measures."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = {fork(rank, place, folder) for rank in range(count)}
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status:
            for each in ranks:
                os.kill(each, signal.SIGKILL)
            sys.exit(f"a process ended with {status}")
    found: dict[str, list[dict[str, float]]] = json.loads((folder / "found.json").read_text())
    return found


def fork(rank: int, place: dict[str, str], folder: Path) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        warnings.simplefilter("ignore")
        os.environ |= place | {"RANK": str(rank)}
        world = ProcessGroup()
        if place["WORLD_SIZE"] != "1":
            dist.init_process_group("gloo")
            world, GROUP[0] = ProcessGroup(rank, int(place["WORLD_SIZE"])), dist.new_group(backend="gloo")
        found = take_turns(world, folder)
        if rank == 0:
            (folder / "found.json").write_text(json.dumps(found))
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    results = []
    for count in (1, 2):
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        say(f"{count} process(es); the machine's load is {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        try:
            found = in_processes(count, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        figures = {name: [each["stall"] for each in rounds] for name, rounds in found.items()}
        for name, rounds in found.items():
            show(name, rounds)
        where = "one process" if count == 1 else "two processes"
        ours = median(figures["falaj"])
        for peer in ("torch.save", "async_save"):
            what = f"seconds that 1 GB stalls the training, {where} (peer: {peer})"
            results.append(
                Result(what, ours, median(figures[peer]), goal=GOAL if peer == "torch.save" else 1.0)
            )
    report("checkpoint", results)


def show(name: str, rounds: list[dict[str, float]]) -> None:
    words = []
    for figure in ("stall", "kept"):
        values = sorted(each[figure] for each in rounds)
        words.append(f"{figure} {median(values):.3f} s ({values[0]:.3f} to {values[-1]:.3f})")
    say(f"  {name:<11} {', '.join(words)}")


if __name__ == "__main__":
    main()
