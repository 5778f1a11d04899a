"""A real `falaj up` in processes of its own, as the user of the tests or, where that is root, as an ordinary user."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import falaj as fj
from polling import PATIENCE_S, eventually

ROOT = Path(__file__).parents[1]
OWN, ORDINARY = "the user of the tests", "an ordinary user"
USERS = (OWN, ORDINARY) if os.geteuid() == 0 else (OWN,)
"""The users that a platform can run as here."""


OPEN_FOLDER = """
set -e
stage=$(mktemp -d)
mount --bind "$2" "$stage"
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir -p "$2"
mount --bind "$stage" "$2"
shift 2
exec "$@"
"""
"""Shows in the folder $1, which is closed to other users, the folder $2 alone; then runs the rest of its arguments."""


@contextmanager
def running_platform(
    folder: Path, toml: str = "", *, user: str = OWN, variables: Mapping[str, str] | None = None
) -> Iterator[fj.Platform]:
    """Yield a connection to a platform of `user`, whose home is in `folder` or, for an ordinary user, beside it."""
    with ExitStack() as stack:
        prefix: list[str] = []
        environment = {**os.environ, **(variables or {})}
        if user == ORDINARY:
            name, folder = stack.enter_context(ordinary_account())
            prefix = command_prefix(name)
            environment |= {"HOME": str(folder), "USER": name, "LOGNAME": name, "TMPDIR": str(folder)}
        environment |= {"FALAJ_CONFIG_DIR": str(folder / "config"), "FALAJ_CONSOLE": "off"}
        home = folder / "home"
        home.mkdir(mode=0o700, exist_ok=True)
        (home / "falaj.toml").write_text(toml)
        if user == ORDINARY:
            for each in (home, home / "falaj.toml"):
                shutil.chown(each, folder.owner(), folder.group())
        command = [*prefix, sys.executable, "-m", "falaj", "--home", str(home), "up", "--port", "0"]
        printed = stack.enter_context((folder / "printed").open("w+"))
        process = stack.enter_context(
            subprocess.Popen(command, env=environment, stdout=printed, stderr=printed, cwd=folder)
        )
        stack.callback(_stop, process)
        url = eventually(lambda: _address(home, process, folder / "printed"))
        known = json.loads((folder / "config" / "credentials.json").read_text())
        platform = stack.enter_context(fj.connect(url, _token(known, url)))
        eventually(lambda: platform.platform.status().controller)
        yield platform


@contextmanager
def ordinary_account() -> Iterator[tuple[str, Path]]:
    """Create an account, and yield its name and a folder of its own; both are removed at the end."""
    name = f"falaj-test-{secrets.token_hex(4)}"
    _change_accounts("useradd", "--system", "--no-create-home", "--user-group", name)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir="/tmp"))  # pytest's are closed to others
    try:
        shutil.chown(folder, name, name)
        yield name, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _change_accounts("userdel", name)


def _change_accounts(*command: str) -> None:
    """Run a command that changes the accounts of the machine; one at a time can."""

    def has_run() -> bool:
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return True

    eventually(has_run)


def command_prefix(account: str) -> list[str]:
    """Return the beginning of a command line that runs the rest as `account`, which can read this Python and Falaj."""
    drop = ["setpriv", f"--reuid={account}", f"--regid={account}", "--init-groups", "--"]
    opened: list[str] = []
    for needed in (Path(sys.base_prefix).resolve(), ROOT):
        closed = [folder for folder in needed.parents if not folder.stat().st_mode & 0o001]
        if closed:
            opened += ["sh", "-c", OPEN_FOLDER, "sh", str(closed[-1]), str(needed)]
    return [*(["unshare", "--mount", *opened] if opened else []), *drop]


def _address(home: Path, process: subprocess.Popen[bytes], printed: Path) -> str | None:
    assert process.poll() is None, printed.read_text()
    running = home / "run.json"
    return str(json.loads(running.read_text())["url"]) if running.exists() else None


def _token(known: dict[str, object], url: str) -> str:
    found = known[url]
    return str(found["token"] if isinstance(found, dict) else found)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
