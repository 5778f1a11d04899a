"""What a run has survived: where it was broken off and went on, and whether it computed the same again.

Each resume is a parameter of the run, written before the first step: an attempt that dies before its first checkpoint
is remembered too. Steps that are computed again are compared with all that was logged of them before; the checkpoints
carry what came of that, each for the steps up to its own.
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
    """One time that a run went on."""

    step: int
    """The one that it went on from; those after it are computed again."""
    reached: int
    """The last step whose loss had been logged by then."""
    killed: bool
    """Whether the attempt before was broken off; it ended in order otherwise."""
    layout_before: str
    layout: str
    at: float
    """Seconds since 1970."""


class ResumeHistory:
    """What a run that stands at `before` has survived so far, and what is being compared now."""

    def __init__(
        self, before: Position, *, layout: str, is_exact: bool = False, notify: Callable[[str], None] = print
    ) -> None:
        self.layout = layout
        self.resumes: list[ResumeRecord] = []
        self.compared = before.compared
        """Losses that were logged for steps which were computed again."""
        self.difference = before.difference
        """The largest between two losses of the same step."""
        self.changed = tuple(before.changed)
        """Facts that were not the same for all the steps, in words."""
        self.unread: tuple[str, ...] = ()
        """What the attempts before have left and could not be read, in words."""
        self._before, self._is_exact, self.notify = before, is_exact, notify
        self._logged: dict[int, list[float]] = {}
        self._has_complained = False

    def load_history(self, agent: Agent, *, goes_on: bool, differing: Sequence[str] = ()) -> None:
        """Ask what the attempts before have left. One that `goes_on` adds itself to the list, with what is `differing`
        now; and so does one that begins anew, where they have logged losses but kept nothing."""
        past = agent.load_history(self._before.step)
        self.unread = tuple(past.unread)
        if self.unread:
            self.notify(f"{', '.join(self.unread)} could not be read: passed over, and not compared with")
        told = filter(None, map(parse_resume, past.resumes))
        self.resumes = sorted(told, key=lambda each: each.at)
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
        """Hear the losses of the steps from `first` on; those that were logged before must be equal."""
        if not self._logged:
            return
        for step, loss in enumerate(losses, first):
            if (before := self._logged.pop(step, None)) is not None:
                self.compared += len(before)
                self._note(step, before, loss)

    def remember(self, position: Position) -> Position:
        """`position` with what must be remembered of this."""
        found = replace(position, compared=self.compared, difference=self.difference)
        return replace(found, layout=self.layout, changed=self.changed)

    def _note(self, step: int, before: list[float], loss: float) -> None:
        apart = max(*before, loss) - min(*before, loss)
        self.difference = max(self.difference, apart)
        if apart and self._is_exact and not self._has_complained:
            self._has_complained = True
            then = ", ".join(f"{each!r}" for each in before)
            self.notify(
                f"ERROR: this run is not exact: the loss of step {step} is {loss!r}, and was {then} before it was "
                f"broken off; {apart:g} apart. Something in the model or the data is random beyond torch and Python's "
                "random, or differs between machines. Going on; the certificate will say so"
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
    """What `recall` has written; none if somebody else has."""
    try:
        said = json.loads(words)
        return ResumeRecord(**{name: said[name] for name in ResumeRecord.__dataclass_fields__})
    except (ValueError, TypeError, KeyError):
        return None
