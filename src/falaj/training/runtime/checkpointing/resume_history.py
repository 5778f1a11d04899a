"""The interruptions and resumes of a run, and whether recomputed losses are equal to the logged ones.

Each resume is a parameter of the run, written before the first step, so that attempts which die before their first
checkpoint are recorded too. Recomputed losses are compared with all logged ones; each checkpoint holds the outcome for
the steps up to its own.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from falaj.training.runtime.agent.agents import RESUME_PREFIX, Agent
from falaj.training.runtime.checkpointing.position import Position


@dataclass(frozen=True)
class ResumeRecord:
    """One resume of a run."""

    step: int
    """The step of the restored checkpoint; later steps are computed again."""
    reached: int
    """The last step whose loss had been logged."""
    killed: bool
    """Whether the attempt before was interrupted rather than ended."""
    layout_before: str
    layout: str
    at: float
    """Seconds since 1970."""


class ResumeHistory:
    """The resumes of a run that stands at `before`, and the comparison of its recomputed losses."""

    def __init__(
        self, before: Position, *, layout: str, is_exact: bool = False, notify: Callable[[str], None] = print
    ) -> None:
        self.layout = layout
        self.resumes: list[ResumeRecord] = []
        self.compared = before.compared
        """Number of logged losses of recomputed steps."""
        self.difference = before.difference
        """The largest difference between two losses of one step."""
        self.changed = tuple(before.changed)
        """Descriptions of facts that were not equal for all steps."""
        self.unread: tuple[str, ...] = ()
        """Descriptions of earlier records that could not be read."""
        self._before, self._is_exact, self.notify = before, is_exact, notify
        self._logged: dict[int, list[float]] = {}
        self._has_complained = False

    def load_history(self, agent: Agent, *, goes_on: bool, differing: Sequence[str] = ()) -> None:
        """Load the records of earlier attempts, and add this attempt.

        It is added if it `goes_on`, with the facts that are `differing`, or if losses were logged without a checkpoint.
        """
        past = agent.load_history(self._before.step)
        self.unread = tuple(past.unread)
        if self.unread:
            self.notify(f"{', '.join(self.unread)} could not be read; skipped in the comparison")
        parsed = filter(None, map(parse_resume, past.resumes))
        self.resumes = sorted(parsed, key=lambda each: each.at)
        logged = defaultdict(list)
        for step, loss in past.losses:
            if math.isfinite(loss):
                logged[step].append(loss)
        self._logged = dict(logged)
        if goes_on:
            self.changed = tuple(dict.fromkeys([*self.changed, *differing]))
        if goes_on or self._logged:
            self.resumes.append(self._this())
            number = f"{RESUME_PREFIX}{len(past.resumes) + 1}"
            agent.params({number: json.dumps(asdict(self.resumes[-1]), ensure_ascii=False)})

    def compare(self, first: int, losses: Sequence[float]) -> None:
        """Compare the losses of the steps from `first` on with those that were logged before."""
        if not self._logged:
            return
        for step, loss in enumerate(losses, first):
            if (before := self._logged.pop(step, None)) is not None:
                self.compared += len(before)
                self._note(step, before, loss)

    def remember(self, position: Position) -> Position:
        """Return `position` with the outcome of the comparison."""
        found = replace(position, compared=self.compared, difference=self.difference)
        return replace(found, layout=self.layout, changed=self.changed)

    def _note(self, step: int, before: list[float], loss: float) -> None:
        apart = max(*before, loss) - min(*before, loss)
        self.difference = max(self.difference, apart)
        if apart and self._is_exact and not self._has_complained:
            self._has_complained = True
            then = ", ".join(f"{each!r}" for each in before)
            self.notify(
                f"ERROR: this run is not exact: the loss of step {step} is {loss!r}, and was {then} before the "
                f"interruption; the difference is {apart:g}. The model or the data uses random numbers beside those of "
                "torch, Python and numpy, or the machines differ. Training continues; the certificate records it"
            )

    def _this(self) -> ResumeRecord:
        step, earlier = self._before.step, self.resumes[-1] if self.resumes else None
        ended = self._before.left_at is None and not (earlier and earlier.step == step)
        return ResumeRecord(
            step=step,
            reached=max(self._logged, default=step),
            killed=not ended,
            layout_before=earlier.layout if earlier else self._before.layout,
            layout=self.layout,
            at=time.time(),
        )


def parse_resume(words: str) -> ResumeRecord | None:
    """Return the resume in a parameter; None if it is not one."""
    try:
        said = json.loads(words)
        return ResumeRecord(**{name: said[name] for name in ResumeRecord.__dataclass_fields__})
    except (ValueError, TypeError, KeyError):
        return None
