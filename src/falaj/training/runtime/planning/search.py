"""The plan search: tries candidates within a time budget, and reports the outcome of each in a table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from falaj.training.runtime.planning.candidates import SearchSpace, generate_candidates
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.planning.trial_process import TrialProcess, TrialProcessLost, can_fork
from falaj.training.runtime.planning.trials import TrialOutcome, TrialRunner

MIN_TRIAL_S = 1.0
MIN_COMPILE_S = 8.0
"""With less time left, compilation is not started; three times as much without a child process that can be killed.
"""
MIN_AUTOTUNE_S = 60.0
REHEARSAL_SHARE, COMPILE_REHEARSAL_SHARE = 0.5, 0.8
"""The shares of the remaining time that a rehearsal may take."""
OUT_OF_TIME = "not tried: out of time"


@dataclass
class SearchResult:
    """The outcomes of a search. `best` is None if not even the plain plan could run."""

    tried: list[TrialOutcome] = field(default_factory=list)
    best: TrialOutcome | None = None
    seconds: float = 0.0

    @property
    def plan(self) -> Plan | None:
        return self.best.plan if self.best else None


TryPlan = Callable[[Plan, float], TrialOutcome]
"""Tries a plan within a number of seconds."""


def search(space: SearchSpace, try_out: TryPlan, *, budget: Callable[[TrialOutcome], float]) -> SearchResult:
    """Return the best candidate that could be tried; `budget` derives the time limit from the first outcome."""
    found, began = SearchResult(), time.monotonic()
    candidates, outcome, allowed_s = generate_candidates(space), None, 0.0
    compile_s = 0.0
    try:
        plan = next(candidates)
        while True:
            left_s = allowed_s - (time.monotonic() - began)
            if outcome is None:
                outcome = try_out(plan, 1e9)
                allowed_s = budget(outcome)
            elif left_s < min_seconds_left(plan, space, compile_s=compile_s):
                outcome = TrialOutcome(plan=plan, rejection=OUT_OF_TIME)
            else:
                outcome = try_out(plan, left_s)
            record_outcome(found, outcome, margin=space.margin)
            if plan.compile == "default" and not outcome.rejection:
                compile_s = max(compile_s, outcome.seconds)
            plan = candidates.send(outcome)
    except StopIteration:
        pass
    found.seconds = time.monotonic() - began
    return found


def min_seconds_left(plan: Plan, space: SearchSpace, *, compile_s: float = 0.0) -> float:
    """Return the seconds without which `plan` is not tried; `compile_s`: what an earlier compiled one took."""
    if plan.compile == "off":
        return MIN_TRIAL_S
    if plan.compile.startswith("max-autotune"):
        return MIN_AUTOTUNE_S
    return max(compile_s, MIN_COMPILE_S if space.risky else 3 * MIN_COMPILE_S)


def record_outcome(found: SearchResult, outcome: TrialOutcome, *, margin: float) -> None:
    found.tried.append(outcome)
    if outcome.rejection is not None:
        return
    if found.best is None or outcome.samples_per_second > margin * found.best.samples_per_second:
        found.best = outcome


def confirm(found: SearchResult, try_out: TryPlan, *, margin: float) -> SearchResult:
    """Try the first and the best plan again: on a shared machine one measurement is not enough."""
    first, best = found.tried[0], found.best
    if best is None or best.plan == first.plan:
        return found
    ours, plain = (try_out(plan, 1e9).samples_per_second for plan in (best.plan, first.plan))
    if ours < margin * plain:
        found.tried.append(replace(best, rejection="not faster in a second trial"))
        found.best = first
    return found


class SubprocessTrials:
    """Tries plans in a child process, and starts a new one after each that was lost."""

    def __init__(self, runner: TrialRunner, *, alive: Callable[[], bool]) -> None:
        self._runner, self._alive = runner, alive
        self._child: TrialProcess | None = None

    def start(self) -> TrialProcess:
        """Start a child process. Raise TrialProcessLost if it cannot use the device."""
        self._child = TrialProcess(self._runner, alive=self._alive)
        self._child.wait_ready()
        return self._child

    def __call__(self, plan: Plan, within_s: float) -> TrialOutcome:
        began = time.monotonic()
        try:
            child = self._child or self.start()
            return child.try_out(plan, within_s=within_s)
        except TrialProcessLost as loss:
            self.end()
            return TrialOutcome(plan=plan, rejection=str(loss), seconds=time.monotonic() - began)

    def end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class RehearsedTrials:
    """Tries plans in this process, each after one successful step in a child process.

    A child that hangs is killed early enough to try other plans. `plain`, the fallback of the run, is not
    rehearsed. What a child has compiled, this process finds in the compiler's cache. If children cannot train, because
    of the threads that torch has here, nothing is rehearsed.
    """

    def __init__(self, runner: TrialRunner, *, plain: Plan, alive: Callable[[], bool]) -> None:
        self._runner, self._alive = runner, alive
        self._safe = {plain}
        self._can_rehearse = can_fork()

    def __call__(self, plan: Plan, within_s: float) -> TrialOutcome:
        began = time.monotonic()
        if plan not in self._safe and self._can_rehearse:
            part = REHEARSAL_SHARE if plan.compile == "off" else COMPILE_REHEARSAL_SHARE
            rehearsed = self._rehearse(plan, part * within_s)
            if rehearsed is not None and rehearsed.rejection is not None:
                return rehearsed
        self._safe.add(plan)
        self._alive()
        return replace(self._runner.try_out(plan), seconds=time.monotonic() - began)

    def _rehearse(self, plan: Plan, within_s: float) -> TrialOutcome | None:
        child = SubprocessTrials(self._runner.for_rehearsal(), alive=self._alive)
        try:
            child.start()
        except TrialProcessLost:
            child.end()
            self._can_rehearse = False
            return None
        try:
            return child(plan, within_s)
        finally:
            child.end()  # nothing else may run while a plan is measured


def format_outcomes(found: SearchResult) -> str:
    """Return the tried plans as a table for people."""
    rows = [("plan", "samples/s", "× plain", "loss", "gradient", "s", "")]
    plain = found.tried[0].samples_per_second if found.tried else 0.0
    for each in found.tried:
        rate, errors = each.samples_per_second, each.errors
        rows.append(
            (
                each.plan.summary,
                f"{rate:,.0f}" if rate else "",
                f"{rate / plain:.2f}" if rate and plain else "",
                f"{errors.loss:.1e}" if errors else "",
                f"{errors.gradient:.1e}" if errors else "",
                f"{each.seconds:.1f}",
                each.rejection or ("chosen" if each is found.best else ""),
            )
        )
    widths = [max(len(row[place]) for row in rows) for place in range(6)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in rows]
    return "\n".join(f"{line}  {row[6]}".rstrip() for line, row in zip(lines, rows, strict=True))
