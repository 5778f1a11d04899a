"""The state of a run besides its tensors, and the facts that must not change before it resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from falaj.training.runtime.errors import CheckpointMismatch, TrainingFault
from falaj.training.runtime.step.step import Step

Facts = Mapping[str, int | str | bool]

ANOTHER_RUN = 'another run="…" to start again'
ADDRESSING = ("seed", "batch_size", "samples", "drop_last", "shuffle")
"""Facts that define the samples of a step; a run cannot resume with others."""


@dataclass(frozen=True)
class Position:
    """The position of a run, besides its tensors. Step 0 is the beginning."""

    step: int = 0
    ledger: str | None = None
    best_step: int | None = None
    best_score: float | None = None
    stale: int = 0
    pieces: int = 0
    """The number of micro-batches since memory ran out; 0 if it never did."""
    useful_s: float = 0.0
    spent_s: float = 0.0
    """Seconds in useful training steps, and in total, since the run began."""
    left_at: float | None = None
    """When the run was here, in seconds since 1970; None if it ended here."""
    kept_step: int | None = None
    """The step with the best score among the kept checkpoints."""
    kept_score: float | None = None
    layout: str = ""
    """The process layout at this step."""
    compared: int = 0
    difference: float = 0.0
    """Number of recomputed losses that were compared, and the largest difference, up to this step."""
    changed: Sequence[str] = ()
    """Descriptions of facts that were not equal for all steps so far."""
    ended_of: int | None = None
    """The requested number of steps when a callback ended the run here; a call that requests more continues."""

    def is_ended(self, total: int) -> bool:
        """Return whether a callback has ended the run before its `total` steps."""
        return self.ended_of is not None and self.step < total <= self.ended_of


def run_metadata(step: Step, position: Position, facts: Facts) -> dict[str, Any]:
    """Return the run section of the manifest at `position`."""
    return {
        "position": asdict(position),
        "facts": dict(facts),
        "optimizer": type(step.optimizer).__name__,
        "groups": step.groups.changed(),
        "scaler": step.scaler.state_dict() if step.scaler else None,
    }


def read_position(run: Mapping[str, Any]) -> Position:
    """Return the position in a manifest; fields of later versions are ignored."""
    known = {field.name for field in fields(Position)}
    return Position(**{name: value for name, value in run["position"].items() if name in known})


def fix_of(name: str, before: object) -> str:
    """Return the fix for a changed fact that defines the batches."""
    back = "the data that the run started with" if name == "samples" else f"{name}={before!r}"
    return f"{back}, as before; or {ANOTHER_RUN}"


def with_last_fix(faults: Sequence[TrainingFault], fix: str) -> list[TrainingFault]:
    """Return `faults` of one cause with its fix on the last one."""
    return [*faults[:-1], replace(faults[-1], fix=fix)]


def compare_facts(then: Facts, now: Facts) -> list[str]:
    """Return descriptions of changed facts; raise CheckpointMismatch if the batches would change."""
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
