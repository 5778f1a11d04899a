"""Saved tokens by address, in one file that only its owner can read."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from falaj.errors import NotFound, Unauthenticated
from falaj.records.places import default_config_dir
from falaj.records.record import utc_now

RENEW_BEFORE = timedelta(days=7)
"""How long before its end the token of the owner of a home is renewed."""


def credentials_file() -> Path:
    """Return the path of the file."""
    return default_config_dir() / "credentials.json"


def token_for(url: str) -> str:
    """Return the token for `url`: FALAJ_TOKEN, unless FALAJ_URL names another platform, else the saved one."""
    belongs_to = os.environ.get("FALAJ_URL") or url
    given = os.environ.get("FALAJ_TOKEN") if _address(belongs_to) == _address(url) else None
    token = given or _saved(url).get("token")
    if not token:
        raise Unauthenticated(
            f"there is no token for {url}; set FALAJ_TOKEN, or run 'falaj login {url}#code=…' with a sign-in link; the "
            "owner of the home runs 'falaj login' on its machine"
        )
    return str(token)


def expires_within(url: str, margin: timedelta) -> bool:
    """Tell whether the token for `url` is missing, has expired, or does so within `margin`.

    False for a token whose end is not known: FALAJ_TOKEN, and one that somebody signed in with.
    """
    if os.environ.get("FALAJ_TOKEN"):
        return False
    found = _saved(url)
    until = found.get("expires_at")
    return not found or (until is not None and datetime.fromisoformat(until) - utc_now() < margin)


def save(url: str, token: str, *, expires_at: datetime | None = None) -> None:
    """Save `token` for the platform at `url`, with its end where that is known."""
    kept = token if expires_at is None else {"token": token, "expires_at": expires_at.isoformat()}
    with _locked():
        _write(_read() | {_address(url): kept})


def forget(url: str) -> None:
    """Remove the token for the platform at `url`."""
    with _locked():
        _write({address: token for address, token in _read().items() if address != _address(url)})


def sign_in(url: str, code: str) -> tuple[str, str]:
    """Redeem a sign-in code at `url`, and save the token; return the address of the API and the name of the user.

    A link of the console will do: it says where its API is.
    """
    from falaj.sdk.remote import connect, redeem

    try:
        token = redeem(url, code)
    except NotFound as error:
        if "api" not in error.details:
            raise
        url = str(error.details["api"])
        token = redeem(url, code)
    with connect(url, token) as platform:
        name = platform.users.whoami().principal.name
    save(url, token)
    return url, name


def _address(url: str) -> str:
    return url.rstrip("/")


def _saved(url: str) -> dict[str, str]:
    """Return the token for `url` and, where it is known, its end."""
    found = _read().get(_address(url))
    return found if isinstance(found, dict) else {"token": found} if found else {}


def _read() -> dict[str, Any]:
    path = credentials_file()
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise Unauthenticated(
                f"{path} can be read by others ({stat.filemode(mode)}); run: chmod 600 {path}"
            )
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise Unauthenticated(f"{path} is not JSON; remove it and sign in again") from None
    return dict(found)


def _write(tokens: dict[str, Any]) -> None:
    path = credentials_file()
    draft = path.with_suffix(f".{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(tokens, file)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


@contextmanager
def _locked() -> Iterator[None]:
    directory = credentials_file().parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / "credentials.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
