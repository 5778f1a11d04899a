"""The errors of the runtime. This module must be importable where only torch is installed.

TrainingError               training.failed
├── InvalidTraining         training.invalid      an option, the model or the data cannot be used
│   └── RaggedBatch         training.ragged       the samples of a batch differ in shape
├── SampleUnreadable        training.unreadable   the dataset failed to return a sample
├── WorkerLost              training.worker       a data worker process died
├── LossNotFinite           training.not_finite   the loss or a parameter became NaN or infinite
├── OutOfMemory             training.memory       memory runs out, however small the pieces
├── NoEstimate              training.no_estimate  the memory of a model cannot be estimated
├── CallbackFailed          training.callback     a callback failed; the run was saved before it ended
├── CheckpointDamaged       checkpoint.damaged    the stored bytes are not what was written
├── CheckpointMismatch      checkpoint.mismatch   written by another model, optimizer or run
├── CheckpointFailed        checkpoint.failed     the run could not be saved
├── CertificateInvalid      certificate.false     a certificate does not hold
└── AgentLost               agent.lost            the agent beside the runtime does not answer
    └── AgentRefused        agent.refused         the platform does not know this attempt, or it is over
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class TrainingFault:
    """One fault of the input: where, what was given, what is allowed, and the fix."""

    where: str
    given: object = None
    allowed: str | None = None
    fix: str | None = None

    def lines(self) -> list[str]:
        rows = (("given", self.given), ("allowed", self.allowed), ("fix", self.fix))
        return [self.where, *(f"  {name:<8} {value}" for name, value in rows if value is not None)]


class TrainingError(Exception):
    """The training failed. The base of the runtime's errors: a message for people, a stable `code` for programs."""

    code: ClassVar[str] = "training.failed"

    def __init__(self, message: str, *, faults: Iterable[TrainingFault] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.faults = tuple(faults)

    def __str__(self) -> str:
        return "\n".join([self.message, *(line for fault in self.faults for line in fault.lines())])


class InvalidTraining(TrainingError):
    """An option, the model or the data cannot be used; `faults` names all faults at once."""

    code = "training.invalid"


class RaggedBatch(InvalidTraining):
    """The samples of a batch differ in shape."""

    code = "training.ragged"


class SampleUnreadable(TrainingError):
    """The dataset failed to return a sample."""

    code = "training.unreadable"

    def __init__(self, message: str, *, sample: int = 0, faults: Iterable[TrainingFault] = ()) -> None:
        super().__init__(message, faults=faults)
        self.sample = sample
        self.step: int | None = None  # set by the reader of the step

    def __str__(self) -> str:
        where = "" if self.step is None else f" of step {self.step}"
        return f"sample {self.sample}{where} cannot be read: {super().__str__()}"


class WorkerLost(TrainingError):
    """A data worker process died."""

    code = "training.worker"


class LossNotFinite(TrainingError):
    """The loss or a parameter became NaN or infinite."""

    code = "training.not_finite"

    def __init__(self, message: str, *, step: int, faults: Iterable[TrainingFault] = ()) -> None:
        super().__init__(message, faults=faults)
        self.step = step


class OutOfMemory(TrainingError):
    """Memory runs out, also with the smallest micro-batches."""

    code = "training.memory"


class NoEstimate(TrainingError):
    """The memory of a model cannot be estimated."""

    code = "training.no_estimate"


class CallbackFailed(TrainingError):
    """A callback raised an exception; the run was saved before it ended."""

    code = "training.callback"


class CheckpointDamaged(TrainingError):
    """The stored bytes of a checkpoint are not what was written."""

    code = "checkpoint.damaged"


class CheckpointMismatch(TrainingError):
    """The checkpoint was written by another model, optimizer or run."""

    code = "checkpoint.mismatch"


class CheckpointFailed(TrainingError):
    """The run could not be saved."""

    code = "checkpoint.failed"


class CertificateInvalid(TrainingError):
    """A certificate does not hold."""

    code = "certificate.false"


class AgentLost(TrainingError):
    """The agent of the platform, through which a job records its run, does not answer."""

    code = "agent.lost"


class AgentRefused(AgentLost):
    """The platform does not accept this process as one of a running attempt, and will not later."""

    code = "agent.refused"
