"""Saved tokens by address, in one file that only its owner can read."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from falaj.errors import Unauthenticated
from falaj.records.places import default_config_dir


def credentials_file() -> Path:
    """Return the path of the file."""
    return default_config_dir() / "credentials.json"


def token_for(url: str) -> str:
    """Return the token for `url`: FALAJ_TOKEN, unless FALAJ_URL names another platform, else the saved one."""
    belongs_to = os.environ.get("FALAJ_URL") or url
    given = os.environ.get("FALAJ_TOKEN") if _address(belongs_to) == _address(url) else None
    token = given or _read().get(_address(url))
    if not token:
        raise Unauthenticated(
            f"there is no token for {url}; set FALAJ_TOKEN, or run 'falaj login {url}#code=…' with a sign-in link"
        )
    return token


def save(url: str, token: str) -> None:
    """Save `token` for the platform at `url`."""
    with _locked():
        _write(_read() | {_address(url): token})


def forget(url: str) -> None:
    """Remove the token for the platform at `url`."""
    with _locked():
        _write({address: token for address, token in _read().items() if address != _address(url)})


def sign_in(url: str, code: str) -> str:
    """Redeem a sign-in code at `url` and save the token; return the name of the user."""
    from falaj.sdk.remote import connect, redeem

    token = redeem(url, code)
    with connect(url, token) as platform:
        name = platform.users.whoami().principal.name
    save(url, token)
    return name


def _address(url: str) -> str:
    return url.rstrip("/")


def _read() -> dict[str, str]:
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


def _write(tokens: dict[str, str]) -> None:
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
