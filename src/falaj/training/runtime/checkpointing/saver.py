"""When a run saves itself, and what becomes of it when that fails."""

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
"""Steps that were evaluated best are saved at once as long as that takes no more than this part of the time."""


class CheckpointSaver:
    """Has the checkpoints of a run kept; without a keeper, nothing is."""

    def __init__(
        self,
        checkpointer: Checkpointer | None,
        agent: Agent | None,
        step: Step,
        facts: Facts,
        options: FitOptions,
        world: ProcessGroup,
    ) -> None:
        every = options.checkpoint_every
        self._checkpointer, self._step, self._facts, self._world = checkpointer, step, facts, world
        self._notify = agent.notify if agent else lambda _: None
        self._every, self._keep = every, options.checkpoint_keep
        self._next = time.monotonic() + (every.total_seconds() if isinstance(every, timedelta) else 0.0)
        self._saving: PendingCheckpoint | None = None
        self._unready = world.device.type == "cuda"
        self.last_started: int | None = None
        """The step of the last checkpoint that was begun, or gone on from."""
        self._failures = 0
        self._position = Position()
        self._is_best = False
        self._best_kept: tuple[int | None, float | None] = None, None
        self._best_rests_until = 0.0
        self._began_at = 0.0
        self.last_stored: int | None = None
        """The step of the last checkpoint that is known to be kept."""
        self.differing: list[str] = []
        """Facts that are not as they were for the steps before, in words."""
        self.saving_s = 0.0
        """How long checkpoints have taken until they were kept, in all."""
        self.stalled_s = 0.0
        """How long the loop has waited for checkpoints, in all."""

    def resume(self) -> Position | None:
        """Put the newest checkpoint that verifies into the model and optimizer; None if there is none."""
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
        """The last good checkpoint, in words; one that is on its way is waited for."""
        if self._saving is not None and self._saving.written.exception() is None:
            self.last_stored = self._saving.step
        return "none was kept" if self.last_stored is None else f"of step {self.last_stored}"

    def due(self, step: int) -> bool:
        """Whether all save now: after so many steps or, as the leading process wishes, after so much time."""
        if self._checkpointer is None:
            return False
        if self._unready:  # only now, after a step, has the optimizer its state
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
        """Hear how the model was evaluated: the best one is saved at once, and stays."""
        if self._checkpointer is None:
            return
        in_time = time.monotonic() >= self._best_rests_until
        is_free = self._saving is None or self._saving.written.done()
        self._is_best = self._world.broadcast_flag(is_best and in_time and is_free)

    def save(self, position: Position) -> None:
        """Begin to save, unless this step was saved as it is. A model that has gone bad does not replace a good one."""
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
        """Return when what was saved is kept; tried once more where that fails."""
        if self._saving is not None:
            position = self._position
            self._settle()
            if self.last_stored != position.step:
                self._begin(position)
                self._settle()

    def wait_for_staging(self) -> None:
        """Return when the state may be changed again."""
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
        """With the best of the steps that are kept, which may be this one."""
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
        """Wait for the checkpoint that is on its way. The first failure is said, the second in a row is raised."""
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
        words = f"the checkpoint of step {saving.step} could not be kept: {failure_reason(failure)}"
        if self._failures > 1 or self.last_stored is None:
            faults = getattr(failure, "faults", ())
            raise CheckpointFailed(
                f"{words}; the last good one: {self.last_checkpoint}", faults=faults
            ) from failure
        self._notify(
            f"{words}; the last good one: {self.last_checkpoint}. Going on; the next one is tried as usual"
        )


def failure_reason(failure: BaseException) -> str:
    """Why, in words."""
    if isinstance(failure, OSError) and failure.strerror:
        return f"{failure.strerror}" + (f" ({failure.filename})" if failure.filename else "")
    return getattr(failure, "message", None) or f"{type(failure).__name__}: {failure}"


def require_finite_parameters(
    model: nn.Module, world: ProcessGroup, *, step: int, last_checkpoint: str
) -> None:
    """The loss can be finite and its gradient not: the parameters tell. All processes refuse if one has to."""
    own = {name: local_tensor(p.detach()) for name, p in model.named_parameters() if p.device.type != "meta"}
    sums = [each.sum() for each in own.values() if each.numel()]  # quick: one bad value spoils its sum
    suspect = bool(sums) and not torch.stack([s.abs().float() for s in sums]).isfinite().all()
    bad = [name for name, each in own.items() if not torch.isfinite(each).all()] if suspect else []
    if not world.any(bool(bad)):
        return
    faults = [TrainingFault(name, "NaN or infinite", "finite values") for name in bad]
    message = f"parameters are not finite after step {step}; the last good checkpoint: {last_checkpoint}"
    raise LossNotFinite(message, step=step, faults=faults)
