"""When a run saves itself, and how it comes back."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch import nn

from falaj.training.runtime.agent import Agent
from falaj.training.runtime.checkpoint_format import decode
from falaj.training.runtime.checkpoints import Facts, Position, capture, newest, restore
from falaj.training.runtime.errors import Fault, LossNotFinite
from falaj.training.runtime.steps import Step
from falaj.training.runtime.world import World


class Saver:
    """Keeps the checkpoints of a run with the agent of the leading process; without an agent, nothing is kept."""

    def __init__(
        self, agent: Agent | None, step: Step, facts: Facts, *, every: int | timedelta, world: World
    ) -> None:
        self._agent, self._step, self._facts, self._world = agent, step, facts, world
        self._keeps = world.agree(agent is not None)
        self._every = every
        self._next = time.monotonic() + (every.total_seconds() if isinstance(every, timedelta) else 0.0)
        self.last: int | None = None

    def resume(self) -> Position | None:
        """Put the newest checkpoint that verifies into the model and optimizer; None if there is none."""
        if not self._keeps:
            return None
        data = self._world.share_bytes(newest(self._agent) if self._agent else None)
        if data is None:
            return None
        position, differing = restore(decode(data), self._step, self._facts)
        self.last = position.step
        if self._agent is not None:
            self._agent.say(f"resuming after step {position.step}")
            for difference in differing:
                self._agent.say(f"not bitwise the same as before: {difference}")
        return position

    @property
    def kept(self) -> str:
        """The last good checkpoint, in words."""
        return "none was kept" if self.last is None else f"of step {self.last}"

    def due(self, step: int) -> bool:
        """Whether all save now: after so many steps, or, as the leading process wishes, after so much time."""
        if not self._keeps:
            return False
        if isinstance(self._every, int):
            return step % self._every == 0
        if self._agent is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every.total_seconds()
            self._world.wishes.add("save")
        return self._world.does("save")

    def save(self, position: Position) -> None:
        """Save, unless this step was saved already. A model that has gone bad does not replace a good one."""
        self._world.fulfil("save")
        if not self._keeps or self.last == position.step:
            return
        refuse_bad_parameters(self._step.model, step=position.step, kept=self.kept)
        parts = capture(self._step, position, self._facts)
        if self._agent is not None:
            self._agent.save_checkpoint(position.step, parts)
        self.last = position.step


def refuse_bad_parameters(model: nn.Module, *, step: int, kept: str) -> None:
    """The loss can be finite and its gradient not: the parameters tell."""
    bad = [name for name, p in model.named_parameters() if not torch.isfinite(p.detach()).all()]
    if bad:
        faults = [Fault(name, "NaN or infinite", "finite values") for name in bad]
        message = f"parameters are not finite after step {step}; the last good checkpoint: {kept}"
        raise LossNotFinite(message, step=step, faults=faults)
