"""What a run must remember, besides its tensors, to go on exactly where it was; and what must not have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from falaj.training.runtime.errors import CheckpointMismatch, TrainingFault
from falaj.training.runtime.step.step import Step

Facts = Mapping[str, int | str | bool]

ANOTHER_RUN = 'another run="…", which begins anew'
ADDRESSING = ("seed", "batch_size", "samples", "drop_last")
"""Facts that define which samples a step sees; a run cannot go on under others."""


@dataclass(frozen=True)
class Position:
    """Where a run stands, besides its tensors. Step 0 is the beginning."""

    step: int = 0
    ledger: str | None = None
    best_step: int | None = None
    best_score: float | None = None
    stale: int = 0
    pieces: int = 0
    """The micro-batches of a step since memory ran out; 0 if it never did."""
    useful_s: float = 0.0
    spent_s: float = 0.0
    """Seconds in training steps that count, and in all, since the run began."""
    left_at: float | None = None
    """When the run was here, in seconds since 1970; none if it ended here."""
    kept_step: int | None = None
    """The step with the best score of those that were kept."""
    kept_score: float | None = None
    layout: str = ""
    """The processes that were here, in words."""
    compared: int = 0
    difference: float = 0.0
    """Losses that were computed again and compared, and the largest difference, up to this step."""
    changed: Sequence[str] = ()
    """Facts that were not the same for all the steps so far, in words."""
    ended_of: int | None = None
    """The steps that were asked for when a callback ended the run here; a call that asks for more goes on."""

    def is_ended(self, total: int) -> bool:
        """Whether a callback has ended the run before its `total` steps."""
        return self.ended_of is not None and self.step < total <= self.ended_of


def run_metadata(step: Step, position: Position, facts: Facts) -> dict[str, Any]:
    """What the manifest says of a run that stands at `position`."""
    return {
        "position": asdict(position),
        "facts": dict(facts),
        "optimizer": type(step.optimizer).__name__,
        "groups": step.groups.changed(),
        "scaler": step.scaler.state_dict() if step.scaler else None,
    }


def read_position(run: Mapping[str, Any]) -> Position:
    """Where the run stood; what a later version has added is left out."""
    known = {field.name for field in fields(Position)}
    return Position(**{name: value for name, value in run["position"].items() if name in known})


def fix_of(name: str, before: object) -> str:
    """How a run can go on that was over other batches."""
    back = "the data that the run began with" if name == "samples" else f"{name}={before!r}"
    return f"{back}, as before; or {ANOTHER_RUN}"


def with_last_fix(faults: Sequence[TrainingFault], fix: str) -> list[TrainingFault]:
    """`faults` of one cause, which has one fix: the last says it."""
    return [*faults[:-1], replace(faults[-1], fix=fix)]


def compare_facts(then: Facts, now: Facts) -> list[str]:
    """What differs now, but does no harm; refuses what does."""
    changed = [name for name in now if then.get(name) != now[name]]
    faults = [
        TrainingFault(name, now[name], str(then.get(name)), fix_of(name, then.get(name)))
        for name in changed
        if name in ADDRESSING
    ]
    if faults:
        raise CheckpointMismatch(
            "the checkpoint belongs to a run over other batches; undo the change, or start a new run",
            faults=faults,
        )
    return [f"{name} is {now[name]}, was {then.get(name)}" for name in changed]
