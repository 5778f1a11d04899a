"""PostgreSQL servers for the tests: that of the package pgserver, or that of the distribution."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest


@contextmanager
def started_postgres(folder: Path) -> Iterator[Path]:
    """Run a server whose data is in `folder`, and yield the folder of its socket; skip where there is none."""
    if find_spec("pgserver") is not None:
        server = import_module("pgserver").get_server(folder / "data")
        try:
            yield server.get_postmaster_info().socket_dir
        finally:
            server.cleanup()
        return
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL: neither the package pgserver nor a server of the distribution is installed")
    data = folder / "data"
    run(
        folder,
        binaries / "initdb",
        "--pgdata",
        data,
        "--username=postgres",
        "--auth=trust",
        "--encoding=UTF8",
    )
    options = f"-c listen_addresses= -c unix_socket_directories={folder}"
    run(folder, binaries / "pg_ctl", "start", "--pgdata", data, "--options", options, "--log", folder / "log")
    try:
        yield folder
    finally:
        run(folder, binaries / "pg_ctl", "stop", "--pgdata", data, "--mode=immediate")


def find_binaries() -> Path | None:
    """Return the folder of the newest server's programs: Debian keeps them out of the PATH."""
    versions = Path("/usr/lib/postgresql").glob("*/bin/pg_ctl")
    on_path = shutil.which("pg_ctl")
    found = max(versions, key=lambda path: int(path.parts[-3]), default=Path(on_path) if on_path else None)
    return found.parent if found else None


def run(folder: Path, *command: str | Path) -> None:
    """Run a program of PostgreSQL, which refuses to be root, in `folder`."""
    account = pwd.getpwnam("nobody") if os.getuid() == 0 else None
    if account is not None:
        os.chown(folder, account.pw_uid, account.pw_gid)
    user, group = (account.pw_uid, account.pw_gid) if account else (None, None)
    subprocess.run(
        command,
        cwd=folder,
        user=user,
        group=group,
        check=True,
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
