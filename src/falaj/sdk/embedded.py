"""`fj.open`: the platform in this process. It means: I own this directory."""

from __future__ import annotations

from pathlib import Path

from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble
from falaj.sdk.platform import Platform


def open_platform(path: str | Path | None = None) -> Platform:
    """Open the home at `path` (FALAJ_HOME, or .falaj) and act as its owner; HomeBusy if a platform runs on it."""
    home = open_home(None if path is None else Path(path))
    lock = home.lock()
    try:
        assembled = assemble(home, as_owner=True)
    except BaseException:
        lock.close()
        raise

    def close() -> None:
        assembled.close()
        lock.close()

    return Platform(assembled.rooms, where=str(home.path), on_close=close)
