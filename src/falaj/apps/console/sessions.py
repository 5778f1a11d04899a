"""Sessions of the console: who signed in, with which token, and until when. They live in memory only."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from falaj.errors import RateLimited
from falaj.records.governance.identity import Identity
from falaj.sdk.platform import Platform

MOST_SESSIONS = 1000
FAILURES, FAILURES_S = 10, 60.0
"""An address may fail to sign in so often in this time; then it waits."""

Clock = Callable[[], float]


@dataclass(eq=False)
class ConsoleSession:
    """A person who is signed in, in one browser."""

    platform: Platform
    identity: Identity
    zone: tzinfo
    address: str
    browser: str
    began: float
    used: float
    token: str | None = None
    """The id of the token, if the console got it from a sign-in link: it is revoked when the person signs out."""
    ident: str = field(default_factory=lambda: secrets.token_hex(8))
    """Names the session in lists; the cookie is another secret."""
    began_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    on_end: list[Callable[[], None]] = field(default_factory=list)
    """Called once when the session ends: pages close, the subscription stops."""
    ended: bool = False

    @property
    def person(self) -> str:
        return self.identity.principal.name

    def forget(self, close: Callable[[], None]) -> None:
        """Call `close` no more when the session ends."""
        if close in self.on_end:
            self.on_end.remove(close)


class SessionStore:
    """The sessions, by a digest of their cookie."""

    def __init__(
        self, *, lasts: timedelta, idle: timedelta, clock: Clock = time.monotonic, most: int = MOST_SESSIONS
    ) -> None:
        self._lasts_s, self._idle_s = lasts.total_seconds(), idle.total_seconds()
        self._clock = clock
        self._most = most
        self._sessions: dict[bytes, ConsoleSession] = {}

    def open(
        self,
        platform: Platform,
        identity: Identity,
        *,
        zone: str,
        address: str,
        browser: str,
        token: str | None,
    ) -> tuple[str, ConsoleSession]:
        """Open a session; return its cookie, which is told once, and the session."""
        self.expire()
        while len(self._sessions) >= self._most:
            self.end(min(self._sessions.values(), key=lambda each: each.used))
        cookie, now = secrets.token_urlsafe(32), self._clock()
        session = ConsoleSession(
            platform, identity, read_zone(zone), address, browser[:200], began=now, used=now, token=token
        )
        self._sessions[_digest(cookie)] = session
        return cookie, session

    def find(self, cookie: str | None) -> ConsoleSession | None:
        """Return the session of a cookie; none if it has ended or expired."""
        session = self._sessions.get(_digest(cookie)) if cookie else None
        if session is not None and self._is_over(session):
            self.end(session)
            return None
        return session

    def touch(self, session: ConsoleSession) -> None:
        """Note that the person does something."""
        session.used = self._clock()

    def end(self, session: ConsoleSession) -> None:
        """End a session: its pages close, and its connection to the API."""
        for digest in [key for key, each in self._sessions.items() if each is session]:
            del self._sessions[digest]
        if session.ended:
            return
        session.ended = True
        for close in [*session.on_end]:
            close()
        session.platform.close()

    def of_person(self, session: ConsoleSession) -> list[ConsoleSession]:
        """Return the sessions of the same person, newest first."""
        mine = session.identity.principal.id
        found = [each for each in self._sessions.values() if each.identity.principal.id == mine]
        return sorted(found, key=lambda each: each.began, reverse=True)

    def expire(self) -> None:
        """End the sessions that are over."""
        for session in [*self._sessions.values()]:
            if self._is_over(session):
                self.end(session)

    def close(self) -> None:
        """End all sessions."""
        for session in [*self._sessions.values()]:
            self.end(session)

    def _is_over(self, session: ConsoleSession) -> bool:
        now = self._clock()
        return now - session.began >= self._lasts_s or now - session.used >= self._idle_s


class SignInLimit:
    """Refuses an address that failed to sign in too often in the last minute."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[str, list[float]] = {}

    def require(self, address: str) -> None:
        """Raise RateLimited if `address` has to wait."""
        now = self._clock()
        recent = [at for at in self._failures.get(address, ()) if now - at < FAILURES_S]
        self._failures[address] = recent
        if not recent:
            del self._failures[address]
        if len(recent) >= FAILURES:
            raise RateLimited(f"too many sign-ins have failed from {address}; wait a minute")

    def add_failure(self, address: str) -> None:
        """Count a failed sign-in of `address`."""
        if len(self._failures) > 10_000:
            self._failures.clear()
        self._failures.setdefault(address, []).append(self._clock())


def read_zone(name: str) -> tzinfo:
    """Return a time zone by the name that a browser gave it; UTC for one that is unknown."""
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        return UTC


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()
