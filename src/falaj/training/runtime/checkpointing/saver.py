"""When checkpoints are saved, and what happens when saving fails."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from falaj.training.runtime.agent.agents import Agent
from falaj.training.runtime.checkpointing.position import Facts, Position, read_position, run_metadata
from falaj.training.runtime.checkpointing.restore import restore_newest
from falaj.training.runtime.checkpointing.state import CheckpointState, collect_state, local_tensor
from falaj.training.runtime.checkpointing.storage.store import Retention
from falaj.training.runtime.errors import CheckpointFailed, LossNotFinite, TrainingFault
from falaj.training.runtime.options import FitOptions
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.step.step import Step

if TYPE_CHECKING:
    from falaj.training.runtime.checkpointing.checkpointer import Checkpointer, PendingCheckpoint

BEST_TIME_SHARE = 0.1
"""A new best step is saved at once if such saves take at most this share of the time."""


class CheckpointSaver:
    """Saves the checkpoints of a run; without a checkpointer it does nothing."""

    def __init__(
        self,
        checkpointer: Checkpointer | None,
        agent: Agent | None,
        step: Step,
        facts: Facts,
        options: FitOptions,
        world: ProcessGroup,
    ) -> None:
        every = options.checkpointing.checkpoint_every
        self._checkpointer, self._step, self._facts, self._world = checkpointer, step, facts, world
        self._notify = agent.notify if agent else lambda _: None
        self._every, self._keep = every, options.checkpointing.checkpoint_keep
        self._next = time.monotonic() + (every.total_seconds() if isinstance(every, timedelta) else 0.0)
        self._saving: PendingCheckpoint | None = None
        self._unready = world.device.type == "cuda"
        self.last_started: int | None = None
        """The step of the last checkpoint that was started or resumed."""
        self._failures = 0
        self._position = Position()
        self._is_best = False
        self._best_kept: tuple[int | None, float | None] = None, None
        self._best_rests_until = 0.0
        self._began_at = 0.0
        self.last_stored: int | None = None
        """The step of the last checkpoint that is known to be stored."""
        self.differing: list[str] = []
        """Descriptions of facts that changed since the earlier steps."""
        self.saving_s = 0.0
        """Total seconds from the start of checkpoints until they were stored."""
        self.stalled_s = 0.0
        """Total seconds that the loop has waited for checkpoints."""

    def resume(self) -> Position | None:
        """Restore the newest valid checkpoint, and return its position; None if there is none."""
        if self._checkpointer is None:
            return None
        found = restore_newest(self._checkpointer, self._step, self._facts, notify=self._notify)
        if found is None:
            return None
        run, self.differing = found
        self._position = position = read_position(run)
        self.last_stored = self.last_started = position.step
        self._best_kept = position.kept_step, position.kept_score
        return position

    @property
    def last_checkpoint(self) -> str:
        """A description of the last good checkpoint, after waiting for a pending one."""
        if self._saving is not None and self._saving.written.exception() is None:
            self.last_stored = self._saving.step
        return "none" if self.last_stored is None else f"of step {self.last_stored}"

    def due(self, step: int) -> bool:
        """Return whether all processes save now: after a number of steps, or after a time that rank 0 measures."""
        if self._checkpointer is None:
            return False
        if self._unready:  # the optimizer has no state before its first step
            self._unready = False
            self._checkpointer.reserve(self._state())
        if self._is_best:
            return True
        if isinstance(self._every, int):
            return step % self._every == 0
        if self._world.is_leader and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every.total_seconds()
            self._world.requests.add("save")
        return self._world.is_agreed("save")

    def note_evaluation(self, *, is_best: bool) -> None:
        """Note the outcome of an evaluation: the best model is saved at once, and kept."""
        if self._checkpointer is None:
            return
        in_time = time.monotonic() >= self._best_rests_until
        is_free = self._saving is None or self._saving.written.done()
        self._is_best = self._world.broadcast_flag(is_best and in_time and is_free)

    def save(self, position: Position) -> None:
        """Start a checkpoint unless this step was saved. Parameters that are not finite are not saved."""
        self._world.clear_request("save")
        was_taken = self.last_started == position.step and self._position.ended_of == position.ended_of
        if self._checkpointer is None or was_taken:
            return
        began = time.perf_counter()
        self._settle()
        require_finite_parameters(
            self._step.model, self._world, step=position.step, last_checkpoint=self.last_checkpoint
        )
        self._begin(position)
        self.stalled_s += time.perf_counter() - began

    def flush(self) -> None:
        """Wait until the pending checkpoint is stored; retry once if that fails."""
        if self._saving is not None:
            position = self._position
            self._settle()
            if self.last_stored != position.step:
                self._begin(position)
                self._settle()

    def wait_for_staging(self) -> None:
        """Wait until the state may be changed again."""
        if self._step.before_update is not None:
            self._step.before_update()

    def _begin(self, position: Position) -> None:
        if self._checkpointer is None:
            return
        self._is_best = False
        self._position = position = self._with_best(position)
        self._saving = self._checkpointer.save(
            self._state(),
            step=position.step,
            run=run_metadata(self._step, position, self._facts),
            retention=Retention(self._keep, position.kept_step),
        )
        self.last_started = position.step
        self._began_at = time.monotonic()
        self._saving.written.add_done_callback(self._note_end)
        self._step.before_update = self._wait

    def _state(self) -> CheckpointState:
        return collect_state(self._step.model, self._step.optimizer, self._step.extra_buffers.changed())

    def _with_best(self, position: Position) -> Position:
        """Return `position` with the best of the kept steps, which may be this one."""
        step, score = self._best_kept
        if position.step == position.best_step:
            step, score = position.best_step, position.best_score
        return replace(position, kept_step=step, kept_score=score)

    def _wait(self) -> None:
        self._step.before_update = None
        if self._saving is not None:
            began = time.perf_counter()
            self._saving.staging.wait()
            self.stalled_s += time.perf_counter() - began

    def _note_end(self, _: Any) -> None:
        took = time.monotonic() - self._began_at
        self.saving_s += took
        self._best_rests_until = time.monotonic() + took * (1 / BEST_TIME_SHARE - 1)

    def _settle(self) -> None:
        """Wait for the pending checkpoint. Report a first failure, and raise the second in a row."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        self._step.before_update = None
        failure = saving.written.exception()
        if failure is None:
            self.last_stored, self._failures = saving.step, 0
            self._best_kept = self._position.kept_step, self._position.kept_score
            return
        self._failures += 1
        words = f"the checkpoint of step {saving.step} could not be saved: {failure_reason(failure)}"
        if self._failures > 1 or self.last_stored is None:
            faults = getattr(failure, "faults", ())
            raise CheckpointFailed(
                f"{words}; the last good one: {self.last_checkpoint}", faults=faults
            ) from failure
        self._notify(
            f"{words}; the last good one: {self.last_checkpoint}. Training continues; the next is saved as scheduled"
        )


def failure_reason(failure: BaseException) -> str:
    """Return the reason of a failure as text."""
    if isinstance(failure, OSError) and failure.strerror:
        return f"{failure.strerror}" + (f" ({failure.filename})" if failure.filename else "")
    return getattr(failure, "message", None) or f"{type(failure).__name__}: {failure}"


def require_finite_parameters(
    model: nn.Module, world: ProcessGroup, *, step: int, last_checkpoint: str
) -> None:
    """Raise LossNotFinite in all processes if one has parameters that are not finite."""
    own = {name: local_tensor(p.detach()) for name, p in model.named_parameters() if p.device.type != "meta"}
    sums = [
        each.sum() for each in own.values() if each.numel()
    ]  # cheap check: one bad value makes its sum bad
    suspect = bool(sums) and not torch.stack([s.abs().float() for s in sums]).isfinite().all()
    bad = [name for name, each in own.items() if not torch.isfinite(each).all()] if suspect else []
    if not world.any(bool(bad)):
        return
    faults = [TrainingFault(name, "NaN or infinite", "finite values") for name in bad]
    message = f"parameters are not finite after step {step}; the last good checkpoint: {last_checkpoint}"
    raise LossNotFinite(message, step=step, faults=faults)
