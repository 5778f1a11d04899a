"""Opens what a run is told to and kept with: in the process that leads, and in the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from falaj.training.runtime.agent.agents import Agent, FolderAgent, checkpoint_folder
from falaj.training.runtime.agent.protocol import platform_agent
from falaj.training.runtime.checkpointing.storage.folder import CheckpointFolder
from falaj.training.runtime.checkpointing.storage.store import CheckpointStore
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.parallel.process_group import ProcessGroup

if TYPE_CHECKING:
    from falaj.training.runtime.checkpointing.checkpointer import Checkpointer

Run = str | Path | Agent | None


@contextmanager
def open_run(run: Run, world: ProcessGroup) -> Iterator[Agent | None]:
    """The agent for `run`, of the process that leads; closed at the end, unless the caller brought it."""
    if not world.is_leader:
        yield None
        return
    if run is not None and not isinstance(run, str | Path):
        yield run
        return
    agent = platform_agent() if run is None else FolderAgent(run)
    try:
        yield agent
    finally:
        if agent is not None:
            agent.close()


@contextmanager
def open_checkpointer(run: Run, agent: Agent | None, world: ProcessGroup) -> Iterator[Checkpointer | None]:
    """What keeps the checkpoints of `run`, in every process; at the end it is waited for. None if nothing is kept."""
    if not world.broadcast_flag(agent is not None):
        yield None
        return
    from falaj.training.runtime.checkpointing.checkpointer import (
        Checkpointer,  # most runs of a search keep nothing
    )

    store = agent.checkpoints() if agent is not None else _store_of_follower(run)
    if world.any(store is None) or store is None:
        fault = TrainingFault("run", run, "the same in all processes, or a folder that all of them see")
        raise InvalidTraining("a process has nowhere to keep its part of a checkpoint", faults=[fault])
    checkpointer = Checkpointer(store, world)
    try:
        yield checkpointer
    finally:
        checkpointer.close()


def _store_of_follower(run: Run) -> CheckpointStore | None:
    if isinstance(run, str | Path):
        return CheckpointFolder(checkpoint_folder(run))
    if run is not None:
        return run.checkpoints()
    agent = platform_agent()
    if agent is None:
        return None
    with closing(agent):  # its checkpoints go over a connection of their own
        return agent.checkpoints()
