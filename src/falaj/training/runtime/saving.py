"""When a run saves itself, and what becomes of it when that fails."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from falaj.training.runtime.agent import Agent
from falaj.training.runtime.checkpoint.store import Retention
from falaj.training.runtime.checkpoints import Facts, Position, describe_run, position_of
from falaj.training.runtime.errors import CheckpointFailed, Fault, LossNotFinite
from falaj.training.runtime.resuming import put_newest
from falaj.training.runtime.settings import Settings
from falaj.training.runtime.state import State, collect, local
from falaj.training.runtime.steps import Step
from falaj.training.runtime.world import World

if TYPE_CHECKING:
    from falaj.training.runtime.checkpoint.keeper import Keeper, Saving

BEST_SHARE = 0.1
"""Steps that were evaluated best are saved at once as long as that takes no more than this part of the time."""


class Saver:
    """Has the checkpoints of a run kept; without a keeper, nothing is."""

    def __init__(
        self,
        keeper: Keeper | None,
        agent: Agent | None,
        step: Step,
        facts: Facts,
        settings: Settings,
        world: World,
    ) -> None:
        every = settings.checkpoint_every
        self._keeper, self._step, self._facts, self._world = keeper, step, facts, world
        self._say = agent.say if agent else lambda _: None
        self._every, self._keep = every, settings.checkpoint_keep
        self._next = time.monotonic() + (every.total_seconds() if isinstance(every, timedelta) else 0.0)
        self._saving: Saving | None = None
        self._unready = world.device.type == "cuda"
        self.taken: int | None = None
        """The step of the last checkpoint that was begun, or gone on from."""
        self._failures = 0
        self._position = Position()
        self._is_best = False
        self._best_kept: tuple[int | None, float | None] = None, None
        self._best_rests_until = 0.0
        self._began_at = 0.0
        self.last: int | None = None
        """The step of the last checkpoint that is known to be kept."""
        self.differing: list[str] = []
        """Facts that are not as they were for the steps before, in words."""
        self.saving_s = 0.0
        """How long checkpoints have taken until they were kept, in all."""
        self.stalled_s = 0.0
        """How long the loop has waited for checkpoints, in all."""

    def resume(self) -> Position | None:
        """Put the newest checkpoint that verifies into the model and optimizer; None if there is none."""
        if self._keeper is None:
            return None
        found = put_newest(self._keeper, self._step, self._facts, say=self._say)
        if found is None:
            return None
        run, self.differing = found
        self._position = position = position_of(run)
        self.last = self.taken = position.step
        self._best_kept = position.kept_step, position.kept_score
        return position

    @property
    def kept(self) -> str:
        """The last good checkpoint, in words; one that is on its way is waited for."""
        if self._saving is not None and self._saving.written.exception() is None:
            self.last = self._saving.step
        return "none was kept" if self.last is None else f"of step {self.last}"

    def due(self, step: int) -> bool:
        """Whether all save now: after so many steps or, as the leading process wishes, after so much time."""
        if self._keeper is None:
            return False
        if self._unready:  # only now, after a step, has the optimizer its state
            self._unready = False
            self._keeper.get_ready(self._state())
        if self._is_best:
            return True
        if isinstance(self._every, int):
            return step % self._every == 0
        if self._world.leads and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every.total_seconds()
            self._world.wishes.add("save")
        return self._world.does("save")

    def judged(self, *, is_best: bool) -> None:
        """Hear how the model was evaluated: the best one is saved at once, and stays."""
        if self._keeper is None:
            return
        in_time = time.monotonic() >= self._best_rests_until
        is_free = self._saving is None or self._saving.written.done()
        self._is_best = self._world.agree(is_best and in_time and is_free)

    def save(self, position: Position) -> None:
        """Begin to save, unless this step was saved as it is. A model that has gone bad does not replace a good one."""
        self._world.fulfil("save")
        was_taken = self.taken == position.step and self._position.ended_of == position.ended_of
        if self._keeper is None or was_taken:
            return
        began = time.perf_counter()
        self._settle()
        refuse_bad_parameters(self._step.model, self._world, step=position.step, kept=self.kept)
        self._begin(position)
        self.stalled_s += time.perf_counter() - began

    def flush(self) -> None:
        """Return when what was saved is kept; tried once more where that fails."""
        if self._saving is not None:
            position = self._position
            self._settle()
            if self.last != position.step:
                self._begin(position)
                self._settle()

    def wait_for_staging(self) -> None:
        """Return when the state may be changed again."""
        if self._step.before_update is not None:
            self._step.before_update()

    def _begin(self, position: Position) -> None:
        if self._keeper is None:
            return
        self._is_best = False
        self._position = position = self._with_best(position)
        self._saving = self._keeper.save(
            self._state(),
            step=position.step,
            run=describe_run(self._step, position, self._facts),
            retention=Retention(self._keep, position.kept_step),
        )
        self.taken = position.step
        self._began_at = time.monotonic()
        self._saving.written.add_done_callback(self._note_end)
        self._step.before_update = self._wait

    def _state(self) -> State:
        return collect(self._step.model, self._step.optimizer, self._step.fleeting.changed())

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
        self._best_rests_until = time.monotonic() + took * (1 / BEST_SHARE - 1)

    def _settle(self) -> None:
        """Wait for the checkpoint that is on its way. The first failure is said, the second in a row is raised."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        self._step.before_update = None
        failure = saving.written.exception()
        if failure is None:
            self.last, self._failures = saving.step, 0
            self._best_kept = self._position.kept_step, self._position.kept_score
            return
        self._failures += 1
        words = f"the checkpoint of step {saving.step} could not be kept: {reason(failure)}"
        if self._failures > 1 or self.last is None:
            faults = getattr(failure, "faults", ())
            raise CheckpointFailed(f"{words}; the last good one: {self.kept}", faults=faults) from failure
        self._say(f"{words}; the last good one: {self.kept}. Going on; the next one is tried as usual")


def reason(failure: BaseException) -> str:
    """Why, in words."""
    if isinstance(failure, OSError) and failure.strerror:
        return f"{failure.strerror}" + (f" ({failure.filename})" if failure.filename else "")
    return getattr(failure, "message", None) or f"{type(failure).__name__}: {failure}"


def refuse_bad_parameters(model: nn.Module, world: World, *, step: int, kept: str) -> None:
    """The loss can be finite and its gradient not: the parameters tell. All processes refuse if one has to."""
    own = {name: local(p.detach()) for name, p in model.named_parameters() if p.device.type != "meta"}
    sums = [each.sum() for each in own.values() if each.numel()]  # quick: one bad value spoils its sum
    suspect = bool(sums) and not torch.stack([s.abs().float() for s in sums]).isfinite().all()
    bad = [name for name, each in own.items() if not torch.isfinite(each).all()] if suspect else []
    if not world.any(bool(bad)):
        return
    faults = [Fault(name, "NaN or infinite", "finite values") for name in bad]
    message = f"parameters are not finite after step {step}; the last good checkpoint: {kept}"
    raise LossNotFinite(message, step=step, faults=faults)
