"""Findings in few words, and an examination that goes on when one of its checks breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from falaj.assembly.home import Home
from falaj.errors import FalajError, Fault
from falaj.records.config import Config
from falaj.records.doctor import Finding

LATER = "made at the first start"


@dataclass(frozen=True)
class DoctorContext:
    """The home under examination; `config` holds the defaults where falaj.toml cannot be read."""

    home: Home
    config: Config

    @property
    def is_made(self) -> bool:
        return bool(self.home.ident)

    @property
    def has_database(self) -> bool:
        return self.config.metadata.url is not None or self.home.database.exists()


Check = Callable[[DoctorContext], Iterable[Finding]]


def guarded(name: str, check: Check, context: DoctorContext) -> list[Finding]:
    """The findings of a check; a check that breaks is a finding, too."""
    try:
        return list(check(context))
    except Exception as error:
        return failures(name, error)


def ok(check: str, words: str) -> Finding:
    return Finding(check=check, status="ok", words=words)


def warn(check: str, words: str, *, fix: str | None = None) -> Finding:
    return Finding(check=check, status="warn", words=words, fix=fix)


def fail(check: str, words: str, *, fix: str | None = None) -> Finding:
    return Finding(check=check, status="fail", words=words, fix=fix)


def failures(check: str, error: Exception) -> list[Finding]:
    """What a check that ended in an error found: one finding for each fault that the error names."""
    if not isinstance(error, FalajError):
        return [fail(check, f"{type(error).__name__}: {error}".partition("\n")[0])]
    found = [fail(check, _told(fault), fix=fault.fix) for fault in error.faults]
    return found or [fail(check, error.message)]


def _told(fault: Fault) -> str:
    parts = [("given", fault.given), ("allowed", fault.allowed)]
    return f"{fault.where}: {', '.join(f'{name} {value}' for name, value in parts if value)}"
