"""Walks through the candidates in a bounded time, and says in a table what came of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from falaj.training.runtime.plan.candidates import Space, walk
from falaj.training.runtime.plan.children import Child, ChildLost, can_fork
from falaj.training.runtime.plan.plans import Plan
from falaj.training.runtime.plan.trials import Outcome, TrialGround

LEAST_LEFT_S = 1.0
COMPILE_LEAST_S = 8.0
"""With less time than this left, compiling is not begun; without a child that can be ended, with less than thrice."""
AUTOTUNE_LEAST_S = 60.0
HANGS_AFTER, COMPILED_AFTER = 0.5, 0.8
"""The parts of the time left that a rehearsal may take."""
TOO_LATE = "not tried: the time is up"


@dataclass
class Found:
    """What a search came to. `best` is none where not even the plain plan could be run."""

    tried: list[Outcome] = field(default_factory=list)
    best: Outcome | None = None
    seconds: float = 0.0

    @property
    def plan(self) -> Plan | None:
        return self.best.plan if self.best else None


Try = Callable[[Plan, float], Outcome]
"""Tries a plan within so many seconds."""


def search(space: Space, try_out: Try, *, budget: Callable[[Outcome], float]) -> Found:
    """The best of the candidates that could be tried; `budget` tells from the first outcome how long all may take."""
    found, began = Found(), time.monotonic()
    candidates, outcome, allowed_s = walk(space), None, 0.0
    try:
        plan = next(candidates)
        while True:
            left_s = allowed_s - (time.monotonic() - began)
            if outcome is None:
                outcome = try_out(plan, 1e9)
                allowed_s = budget(outcome)
            elif left_s < least_left(plan, space):
                outcome = Outcome(plan=plan, why_not=TOO_LATE)
            else:
                outcome = try_out(plan, left_s)
            note(found, outcome, margin=space.margin)
            plan = candidates.send(outcome)
    except StopIteration:
        pass
    found.seconds = time.monotonic() - began
    return found


def least_left(plan: Plan, space: Space) -> float:
    if plan.compile == "off":
        return LEAST_LEFT_S
    if plan.compile.startswith("max-autotune"):
        return AUTOTUNE_LEAST_S
    return COMPILE_LEAST_S if space.risky else 3 * COMPILE_LEAST_S


def note(found: Found, outcome: Outcome, *, margin: float) -> None:
    found.tried.append(outcome)
    if outcome.why_not is not None:
        return
    if found.best is None or outcome.samples_per_second > margin * found.best.samples_per_second:
        found.best = outcome


def confirm(found: Found, try_out: Try, *, margin: float) -> Found:
    """Try the first and the best again, in turn: where others share the machine, once is not enough."""
    first, best = found.tried[0], found.best
    if best is None or best.plan == first.plan:
        return found
    ours, plain = (try_out(plan, 1e9).samples_per_second for plan in (best.plan, first.plan))
    if ours < margin * plain:
        found.tried.append(replace(best, why_not="no faster when it was tried again"))
        found.best = first
    return found


class InChild:
    """Tries plans in a child process, and in a new one after each that was lost."""

    def __init__(self, ground: TrialGround, *, alive: Callable[[], bool]) -> None:
        self._ground, self._alive = ground, alive
        self._child: Child | None = None

    def start(self) -> Child:
        """ChildLost if a child cannot use the device."""
        self._child = Child(self._ground, alive=self._alive)
        self._child.greet()
        return self._child

    def __call__(self, plan: Plan, within_s: float) -> Outcome:
        began = time.monotonic()
        try:
            child = self._child or self.start()
            return child.try_out(plan, within_s=within_s)
        except ChildLost as loss:
            self.end()
            return Outcome(plan=plan, why_not=str(loss), seconds=time.monotonic() - began)

    def end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class Rehearsed:
    """Tries plans in this process, each after one step by it went well in a child.

    A child that hangs is given up while others can still be tried. `plain`, by which the run would be trained in any
    case, is not rehearsed. What a child has compiled, this process finds in the compiler's cache.
    """

    def __init__(self, ground: TrialGround, *, plain: Plan, alive: Callable[[], bool]) -> None:
        self._ground, self._alive = ground, alive
        self._safe = {plain}

    def __call__(self, plan: Plan, within_s: float) -> Outcome:
        began = time.monotonic()
        if plan not in self._safe and can_fork():
            part = HANGS_AFTER if plan.compile == "off" else COMPILED_AFTER
            rehearsed = self._rehearse(plan, part * within_s)
            if rehearsed.why_not is not None:
                return rehearsed
        self._safe.add(plan)
        self._alive()
        return replace(self._ground.try_out(plan), seconds=time.monotonic() - began)

    def _rehearse(self, plan: Plan, within_s: float) -> Outcome:
        child = InChild(self._ground.for_rehearsal(), alive=self._alive)
        try:
            return child(plan, within_s)
        finally:
            child.end()  # while a plan is measured, nothing else computes or holds memory


def table(found: Found) -> str:
    """What was tried, for people."""
    rows = [("plan", "samples/s", "× plain", "loss", "gradient", "s", "")]
    plain = found.tried[0].samples_per_second if found.tried else 0.0
    for each in found.tried:
        rate, errors = each.samples_per_second, each.errors
        rows.append(
            (
                each.plan.words,
                f"{rate:,.0f}" if rate else "",
                f"{rate / plain:.2f}" if rate and plain else "",
                f"{errors.loss:.1e}" if errors else "",
                f"{errors.gradient:.1e}" if errors else "",
                f"{each.seconds:.1f}",
                each.why_not or ("chosen" if each is found.best else ""),
            )
        )
    widths = [max(len(row[place]) for row in rows) for place in range(6)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in rows]
    return "\n".join(f"{line}  {row[6]}".rstrip() for line, row in zip(lines, rows, strict=True))
