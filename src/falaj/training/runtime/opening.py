"""Opens what a run is told to and kept with: in the process that leads, and in the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from falaj.training.runtime.agent import Agent, LocalAgent, checkpoints_of
from falaj.training.runtime.checkpoint.folder import CheckpointFolder
from falaj.training.runtime.checkpoint.store import CheckpointStore
from falaj.training.runtime.errors import Fault, InvalidTraining
from falaj.training.runtime.wire import platform_agent
from falaj.training.runtime.world import World

if TYPE_CHECKING:
    from falaj.training.runtime.checkpoint.keeper import Keeper

Run = str | Path | Agent | None


@contextmanager
def open_run(run: Run, world: World) -> Iterator[Agent | None]:
    """The agent for `run`, of the process that leads; closed at the end, unless the caller brought it."""
    if not world.leads:
        yield None
        return
    if run is not None and not isinstance(run, str | Path):
        yield run
        return
    agent = platform_agent() if run is None else LocalAgent(run)
    try:
        yield agent
    finally:
        if agent is not None:
            agent.close()


@contextmanager
def open_keeper(run: Run, agent: Agent | None, world: World) -> Iterator[Keeper | None]:
    """What keeps the checkpoints of `run`, in every process; at the end it is waited for. None if nothing is kept."""
    if not world.agree(agent is not None):
        yield None
        return
    from falaj.training.runtime.checkpoint.keeper import Keeper  # most runs of a search keep nothing

    store = agent.checkpoints() if agent is not None else _store_of_follower(run)
    if world.any(store is None) or store is None:
        fault = Fault("run", run, "the same in all processes, or a folder that all of them see")
        raise InvalidTraining("a process has nowhere to keep its part of a checkpoint", faults=[fault])
    keeper = Keeper(store, world)
    try:
        yield keeper
    finally:
        keeper.close()


def _store_of_follower(run: Run) -> CheckpointStore | None:
    if isinstance(run, str | Path):
        return CheckpointFolder(checkpoints_of(run))
    if run is not None:
        return run.checkpoints()
    agent = platform_agent()
    if agent is None:
        return None
    with closing(agent):  # its checkpoints go over a connection of their own
        return agent.checkpoints()
