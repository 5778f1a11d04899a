"""The exception tree: callers match types, people read messages, the API maps them to HTTP statuses.

FalajError
├── InvalidInput            input.invalid        a value is outside what is allowed
│   ├── ConfigInvalid       config.invalid       falaj.toml is wrong
│   ├── PolicyInvalid       policy.invalid       a policy does not parse or fit the schema
│   └── TooLarge            input.too_large      more bytes than the interface accepts
├── NotFound                object.not_found     unknown, or not visible to the caller
├── Conflict                object.conflict      the state of the object forbids it
│   ├── AlreadyExists       object.exists        the name is taken
│   └── KeyReused           idempotency.reused   one idempotency key, two different inputs
├── Unauthenticated         caller.unknown       the caller is not authenticated
├── Denied                  policy.denied        policy denies it
│   └── ResidencyDenied     residency.denied     the data may not be stored there
├── Damaged                 data.damaged         stored bytes are not what was written
│   └── Tampered            audit.tampered       the audit log was changed outside the platform
├── KeyUnavailable          keys.unavailable     a key is destroyed, locked or unreachable
├── HomeBusy                home.busy            a running platform holds this home
├── Fenced                  lease.lost           another controller has taken over
├── Interrupted             stream.interrupted   a stream ended early; resume from its cursor
├── Unavailable             service.unavailable  a backing service does not answer
│   ├── Overloaded          serving.overloaded   more requests arrive than can be answered in time
│   ├── RateLimited         serving.rate_limited the caller sends more requests than it may
│   └── DeadlineExceeded    serving.deadline     the time that the request gave itself is over
├── ProcessFailed           process.failed       a process of the platform fails again and again
├── IsolationRefused        isolation.refused    user code cannot be started safely here
└── Internal                internal             a bug in Falaj; the details are in the log
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict


class Fault(BaseModel):
    """A fault in the input: its place, the given value, the allowed values, and the fix."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    where: str
    given: str | None = None
    allowed: str | None = None
    fix: str | None = None

    def lines(self) -> list[str]:
        rows = [("given", self.given), ("allowed", self.allowed), ("fix", self.fix)]
        return [self.where, *(f"  {name:<8} {value}" for name, value in rows if value)]


class FalajError(Exception):
    """An error with a message for people, and a `code`, `faults` and `details` for programs."""

    code: ClassVar[str] = "internal"
    types: ClassVar[dict[str, type[FalajError]]] = {}

    def __init__(
        self, message: str, *, faults: Iterable[Fault] = (), details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.faults = tuple(faults)
        self.details = details or {}

    def __init_subclass__(cls) -> None:
        FalajError.types[cls.code] = cls

    @classmethod
    def at(
        cls, where: str, *, given: object = None, allowed: str | None = None, fix: str | None = None
    ) -> Self:
        """Return the error for a single fault."""
        shown = None if given is None else shorten(given)
        return cls(
            f"{where} is not valid", faults=[Fault(where=where, given=shown, allowed=allowed, fix=fix)]
        )

    def within(self, where: str) -> FalajError:
        """Return the same error with a message that begins with `where` it happened."""
        faults = [fault.model_dump() for fault in self.faults]
        return rebuild(self.code, f"{where}: {self.message}", faults, self.details)

    def __str__(self) -> str:
        return "\n".join([self.message, *(line for fault in self.faults for line in fault.lines())])

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (self.code, self.message, [f.model_dump() for f in self.faults], self.details)


def rebuild(code: str, message: str, faults: list[dict[str, Any]], details: dict[str, Any]) -> FalajError:
    """Return the typed error for `code`, as it was raised in another process."""
    kind = FalajError.types.get(code, Internal)
    error = kind.__new__(kind)
    FalajError.__init__(error, message, faults=[Fault(**f) for f in faults], details=details)
    return error


def shorten(value: object, *, limit: int = 80) -> str:
    """Return `value` on one line, short enough for an error message."""
    if isinstance(value, str | bytes) and len(value) > limit:
        value = value[:limit]
        return f"{value!r}… ({'characters' if isinstance(value, str) else 'bytes'} cut)"
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


class InvalidInput(FalajError):
    """A value is outside what is allowed; `faults` names each one with its fix."""

    code = "input.invalid"


class ConfigInvalid(InvalidInput):
    """falaj.toml, or a file or secret that it names, is wrong."""

    code = "config.invalid"


class PolicyInvalid(InvalidInput):
    """A Cedar policy does not parse, or does not fit the schema."""

    code = "policy.invalid"


class TooLarge(InvalidInput):
    """There are more bytes or files than the interface accepts."""

    code = "input.too_large"


class NotFound(FalajError):
    """The object is unknown, or not visible to the caller."""

    code = "object.not_found"


class Conflict(FalajError):
    """The state of the object forbids the operation."""

    code = "object.conflict"


class AlreadyExists(Conflict):
    """The name is taken."""

    code = "object.exists"


class KeyReused(Conflict):
    """An idempotency key was used before, with other input."""

    code = "idempotency.reused"


class Unauthenticated(FalajError):
    """The caller is not authenticated."""

    code = "caller.unknown"


class Denied(FalajError):
    """Policy denies the operation."""

    code = "policy.denied"


class ResidencyDenied(Denied):
    """The data may not be stored or processed in that zone."""

    code = "residency.denied"


class Damaged(FalajError):
    """Stored bytes are not what was written."""

    code = "data.damaged"


class Tampered(Damaged):
    """The audit log was changed outside the platform."""

    code = "audit.tampered"


class KeyUnavailable(FalajError):
    """An encryption key is destroyed, locked or unreachable."""

    code = "keys.unavailable"


class HomeBusy(FalajError):
    """Another process holds this home."""

    code = "home.busy"


class Fenced(FalajError):
    """Another controller has taken over the lease."""

    code = "lease.lost"


class Interrupted(FalajError):
    """A request or a stream ended early."""

    code = "stream.interrupted"


class Unavailable(FalajError):
    """A backing service does not answer, or a package is not installed."""

    code = "service.unavailable"


class Overloaded(Unavailable):
    """More requests arrive than can be answered in time; `retry_after_s` in the details says when to come back."""

    code = "serving.overloaded"


class RateLimited(Unavailable):
    """The caller sends more requests than it may; `retry_after_s` in the details says when to come back."""

    code = "serving.rate_limited"


class DeadlineExceeded(Unavailable):
    """The time that the request gave itself is over; it was not run."""

    code = "serving.deadline"


class ProcessFailed(FalajError):
    """A process of the platform ends again and again: what waits for it would wait for ever."""

    code = "process.failed"


class IsolationRefused(FalajError):
    """User code cannot be started safely on this machine."""

    code = "isolation.refused"


class Internal(FalajError):
    """A bug in Falaj; the details are in the log."""

    code = "internal"
