"""User callbacks during training, and the end of a run in which one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Final, TypeAlias

from falaj.training.runtime.errors import CallbackFailed, TrainingFault
from falaj.training.runtime.parallel.process_group import GroupRequest

HOOKS: Final = ("on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end")

EXAMPLE: Final = "callbacks=[lambda step, loss: print(step, loss)]"

Callback: TypeAlias = Callable[[int, float], Any] | object
"""A function of a step and its loss; or an object with any of these methods:

on_start(step, total)       before the first step; `step` is the step that the run resumes from
on_step(step, loss)         after each step; on a GPU a little later, since losses are read in groups there
on_evaluation(step, score)  after each evaluation
on_checkpoint(step)         after a checkpoint was staged; it may still be being written
on_end(result)              after the last step was saved

Each may return `STOP`: the run is saved and ends after this step, with several processes after the next one. The run is
finished then: a further call that asks for no more steps than this one does nothing.
"""


class Stop(Enum):
    STOP = "stop"


STOP: Final = Stop.STOP
"""The value with which a callback ends the training; `FitResult.stopped` is "asked" then."""


class Callbacks:
    """The callbacks of a run. After one has failed no other is called, and the run is saved and ends."""

    def __init__(
        self, given: Sequence[Callback], *, request: Callable[[GroupRequest], None], done: int = 0
    ) -> None:
        """`request` asks the process group to end the run, or to stop it until the next call."""
        self._request, self._done = request, done
        self._by_hook = {hook: list(_methods(given, hook)) for hook in HOOKS}
        self._told = 0
        self._failure: CallbackFailed | None = None

    def __bool__(self) -> bool:
        return any(self._by_hook.values())

    def start(self, step: int, total: int) -> None:
        self._call("on_start", step, total)

    def steps(self, losses: Sequence[float]) -> None:
        """Call on_step for the steps whose losses are new; `losses` are all losses of this call."""
        while self._told < len(losses):
            self._told += 1
            self._call("on_step", self._done + self._told, losses[self._told - 1])

    def evaluation(self, step: int, score: float) -> None:
        self._call("on_evaluation", step, score)

    def checkpoint(self, step: int) -> None:
        self._call("on_checkpoint", step)

    def end(self, result: Any, *, last_checkpoint: str) -> None:
        """Call on_end after the run was saved. Raise CallbackFailed if any callback has failed."""
        self._call("on_end", result)
        if self._failure is not None:
            words = f"{self._failure.message}; the run ended, its last checkpoint: {last_checkpoint}"
            raise CallbackFailed(words) from self._failure.__cause__

    def _call(self, hook: str, *values: Any) -> None:
        for name, call in self._by_hook[hook]:
            if self._failure is not None:
                return
            try:
                if call(*values) is STOP:
                    self._request("end")
            except Exception as error:
                self._failure = _failed(name, hook, values, error)
                self._request("stop")


def callback_faults(given: object) -> list[TrainingFault]:
    """Return the faults of the option `callbacks`."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [TrainingFault("callbacks", type(given).__name__, "a list", EXAMPLE)]
    faults = []
    for place, each in enumerate(given):
        unknown = [name for name in dir(each) if name.startswith("on_") and name not in HOOKS]
        if unknown or not any(_methods([each], hook) for hook in HOOKS):
            named = f"{type(each).__name__} with {', '.join(unknown)}" if unknown else type(each).__name__
            allowed = f"a function of (step, loss), or an object with any of {', '.join(HOOKS)}"
            faults.append(TrainingFault(f"callbacks[{place}]", named, allowed, EXAMPLE))
    return faults


def _methods(given: Iterable[Callback], hook: str) -> list[tuple[str, Callable[..., Any]]]:
    found: list[tuple[str, Callable[..., Any]]] = []
    for each in given:
        method = getattr(each, hook, None)
        if callable(method):
            found.append((f"{type(each).__name__}.{hook}", method))
        elif hook == "on_step" and callable(each) and not any(hasattr(each, name) for name in HOOKS):
            found.append((getattr(each, "__qualname__", type(each).__name__), each))
    return found


def _failed(name: str, hook: str, values: Sequence[Any], error: Exception) -> CallbackFailed:
    at = f" at step {values[0]}" if isinstance(values[0], int) else ""
    failed = CallbackFailed(f"the callback {name} failed{at}: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
