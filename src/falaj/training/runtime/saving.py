"""When a run saves itself, and how it comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import nn

from falaj.training.runtime.agent import Agent
from falaj.training.runtime.checkpoints import Facts, Position, capture, newest, restore
from falaj.training.runtime.errors import Fault, LossNotFinite
from falaj.training.runtime.steps import Step


class Saver:
    """Keeps the checkpoints of a run with its agent; without an agent, nothing is kept."""

    def __init__(self, agent: Agent | None, step: Step, facts: Facts, *, every: int | timedelta) -> None:
        self._agent, self._step, self._facts = agent, step, facts
        self._due = _every_steps(every) if isinstance(every, int) else _every_while(every)
        self.last: int | None = None

    def resume(self) -> Position | None:
        """Put the newest checkpoint that verifies into the model and optimizer; None if there is none."""
        contents = newest(self._agent) if self._agent else None
        if self._agent is None or contents is None:
            return None
        position, differing = restore(contents, self._step, self._facts)
        self.last = position.step
        self._agent.say(f"resuming after step {position.step}")
        for difference in differing:
            self._agent.say(f"not bitwise the same as before: {difference}")
        return position

    @property
    def kept(self) -> str:
        """The last good checkpoint, in words."""
        return "none was kept" if self.last is None else f"of step {self.last}"

    def due(self, step: int) -> bool:
        return self._agent is not None and self._due(step)

    def save(self, position: Position) -> None:
        """Save, unless this step was saved already. A model that has gone bad does not replace a good one."""
        if self._agent is None or self.last == position.step:
            return
        refuse_bad_parameters(self._step.model, step=position.step, kept=self.kept)
        self._agent.save_checkpoint(position.step, capture(self._step, position, self._facts))
        self.last = position.step


def refuse_bad_parameters(model: nn.Module, *, step: int, kept: str) -> None:
    """The loss can be finite and its gradient not: the parameters tell."""
    bad = [name for name, p in model.named_parameters() if not torch.isfinite(p.detach()).all()]
    if bad:
        faults = [Fault(name, "NaN or infinite", "finite values") for name in bad]
        message = f"parameters are not finite after step {step}; the last good checkpoint: {kept}"
        raise LossNotFinite(message, step=step, faults=faults)


def _every_steps(every: int) -> Callable[[int], bool]:
    return lambda step: step % every == 0


def _every_while(every: timedelta) -> Callable[[int], bool]:
    pause = every.total_seconds()
    following = time.monotonic() + pause

    def due(_: int) -> bool:
        nonlocal following
        if (now := time.monotonic()) < following:
            return False
        following = now + pause
        return True

    return due
