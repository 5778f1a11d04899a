"""The home: the directory of the platform's state, its lock, and the configuration directory outside it."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from falaj.errors import ConfigInvalid, HomeBusy
from falaj.records.names import new_id
from falaj.records.places import default_config_dir, default_home

LOCK_TRIES = 10


@dataclass(frozen=True)
class Home:
    """Paths of one home. `ident` tells homes apart in the configuration directory."""

    path: Path
    config_dir: Path
    ident: str

    @property
    def toml(self) -> Path:
        return self.path / "falaj.toml"

    @property
    def database(self) -> Path:
        return self.path / "falaj.db"

    @property
    def workflows(self) -> Path:
        return self.path / "workflows.db"

    @property
    def blobs(self) -> Path:
        return self.path / "blobs"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def key_file(self) -> Path:
        return self.config_dir / "keys" / f"{self.ident}.json"

    @property
    def witness(self) -> Path:
        return self.config_dir / "witness" / f"{self.ident}.jsonl"

    @property
    def running(self) -> Path:
        """The file in which a running platform publishes its pid and URL."""
        return self.path / "run.json"

    @property
    def serving(self) -> Path:
        """The marker that something was deployed: the model server is started then."""
        return self.path / "serving"

    @property
    def model_server(self) -> Path:
        """The file in which the model server publishes its local socket."""
        return self.path / "models.json"

    def lock(self) -> IO[str]:
        """Lock this home until the file is closed or the process ends; raise HomeBusy if another process holds it."""
        handle = open(self.path / "lock", "a+")  # noqa: SIM115 - the lock lives as long as the handle
        for attempt in range(LOCK_TRIES):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt < LOCK_TRIES - 1:  # somebody may only be asking whether it is held
                    time.sleep(0.02)
        else:
            handle.close()
            url = self.platform().get("url")
            where = f"at {url}; use fj.connect({url!r})" if url else "in another process"
            raise HomeBusy(f"the home {self.path} is held by a platform that runs {where}, or stop it")
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        return handle

    def is_held(self) -> bool:
        with open(self.path / "lock", "a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def platform(self) -> dict[str, Any]:
        """Return what the platform running on this home published; empty if none runs."""
        try:
            found = json.loads(self.running.read_text())
            holder = int((self.path / "lock").read_text() or 0)
        except (OSError, ValueError):
            return {}
        is_ours = isinstance(found, dict) and found.get("pid") == holder and isinstance(found.get("url"), str)
        return found if is_ours and self.is_held() else {}


def open_home(path: Path | None = None, config_dir: Path | None = None) -> Home:
    """Return the home at `path`; create it if it does not exist."""
    path = (path or default_home()).absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(path)
    path.chmod(0o700)
    ident = path / "id"
    if not ident.exists():
        _write_once(ident, new_id("home"))
    home = Home(path, (config_dir or default_config_dir()).absolute(), ident.read_text().strip())
    for private in (home.config_dir, home.key_file.parent, home.witness.parent, home.logs):
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


def _refuse_foreign(path: Path) -> None:
    """Raise ConfigInvalid if others can write to the home: it names programs and keys to use."""
    for found in (path, path / "falaj.toml"):
        if not found.exists():
            continue
        facts = found.stat()
        if facts.st_uid != os.geteuid():
            raise ConfigInvalid.at(
                str(found), given=f"owned by user {facts.st_uid}", allowed=f"owned by user {os.geteuid()}"
            )
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.filemode(facts.st_mode)
            raise ConfigInvalid.at(
                str(found), given=f"mode {mode}", allowed="writable by you alone", fix=f"chmod go-w {found}"
            )


def find_home(path: Path | None = None, config_dir: Path | None = None) -> Home | None:
    """Return the home at `path`, or none if there is none; it is not created."""
    path = (path or default_home()).absolute()
    return open_home(path, config_dir) if (path / "id").exists() else None


def _write_once(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text + "\n")
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
