"""The home: the directory of the platform's state, its lock, and the configuration directory outside it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from falaj.drivers.fsync import make_directories, sync_directory, sync_file
from falaj.errors import ConfigInvalid, Damaged, Fault, HomeBusy
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

    @property
    def replicas(self) -> Path:
        """The file in which the platform publishes the replicas of its model server, with their load."""
        return self.path / "replicas.json"

    @property
    def replica_state(self) -> Path:
        """The folder of what replicas of the model server share: metrics and rate limits."""
        return self.path / "replicas"

    @property
    def agent_certificate(self) -> Path:
        """Key and certificate of the controller, for the pods of jobs."""
        return self.path / "agent.pem"

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
    make_directories(path)
    _refuse_foreign(path)
    path.chmod(0o700)
    config_dir = (config_dir or default_config_dir()).absolute()
    ident = path / "id"
    if not ident.exists():
        if (lost := lost_id(path, config_dir)) is not None:
            raise lost
        write_once(ident, new_id("home"))
    home = Home(path, config_dir, _read_id(ident))
    for private in (home.config_dir, home.key_file.parent, home.witness.parent, home.logs):
        make_directories(private)
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
    return open_home(path, config_dir) if (path / "id").exists() or _is_used(path) else None


def _read_id(path: Path) -> str:
    ident = path.read_text().strip()
    if not re.fullmatch("home_[0-9a-z]{1,40}", ident):
        raise Damaged(f"{path} holds no id of a home; remove it, and the next command says which id it was")
    return ident


def _is_used(path: Path) -> bool:
    """Tell whether a platform has stored something in `path`; falaj.toml may be there before the first start."""
    if _rows_of(path, "SELECT id FROM governance_epochs"):
        return True
    traces = ("logs/api.jsonl", "logs/cli.log", "blobs/*/.staging", "online/*")
    return any(next(path.glob(trace), None) is not None for trace in traces)


def lost_id(path: Path, config_dir: Path) -> Damaged | None:
    """Return the error for a home that has lost its id: under a new one its keys and its witness would not be found."""
    if not _is_used(path):
        return None
    known = _rows_of(path, "SELECT id FROM governance_homes") or [
        found.stem for found in sorted((config_dir / "keys").glob("home_*.json"))
    ]
    fix = " or ".join(f"echo {ident} > {path / 'id'}" for ident in known[:5])
    return Damaged(
        f"{path / 'id'} is missing, and {path} holds a platform: its keys and its witness are found by that id",
        faults=[
            Fault(
                where=str(path / "id"),
                allowed="the id of this home; the database, key files and backups have it",
                fix=fix or f"restore a backup, or name an empty directory instead of {path}",
            )
        ],
    )


def _rows_of(path: Path, query: str) -> list[str]:
    """Return the first column of what `query` finds in the SQLite database in `path`; nothing if there is none."""
    import sqlite3

    database = path / "falaj.db"
    if not database.exists():
        return []
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as connection:
            return [str(row[0]) for row in connection.execute(query)]
    except sqlite3.Error:  # not migrated yet, or damaged
        return []


def write_once(path: Path, text: str) -> None:
    """Write `text` to the file `path` durably, unless it exists."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    draft.write_text(text + "\n")
    try:
        sync_file(draft)
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
        sync_directory(path.parent)
