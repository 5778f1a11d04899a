"""Runs the command line in this process, and returns its output and exit status."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import falaj
from falaj.apps.cli.app import run
from falaj.control.authorization import controller_caller
from falaj.governance.operations.caller import acting_as
from falaj.sdk.platform import Platform

SOURCE = Path(falaj.__file__).parents[1]


@dataclass(frozen=True)
class CommandResult:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class CommandLine:
    """`falaj` on a home of the test."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def key_file(self) -> Path:
        return next((self.folder / "config" / "keys").glob("*.json"))

    def __call__(self, *arguments: str | Path) -> CommandResult:
        self.capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        return CommandResult(status, *self.capsys.readouterr())

    def done(self, *arguments: str | Path) -> CommandResult:
        """Run a command that must succeed."""
        ran = self(*arguments)
        assert ran.status == 0, ran.err
        return ran

    @contextmanager
    def as_controller(self) -> Iterator[Platform]:
        """Yield the platform of the home, acting as the controller's service account."""
        with falaj.open(self.home) as platform, acting_as(controller_caller(platform.jobs.gate.database)):
            yield platform

    def json(self, *arguments: str | Path) -> Any:
        return self.done(*arguments, "--json").json


@contextmanager
def command_line(
    folder: Path, capsys: pytest.CaptureFixture[str], *, template: Path | None = None
) -> Iterator[CommandLine]:
    """Yield `falaj` in `folder`, on a copy of the home in `template` or on none."""
    if template is not None:
        shutil.copytree(template, folder, dirs_exist_ok=True)
    with restored_log(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FALAJ_HOME", str(folder / "home"))
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        patch.setenv("COLUMNS", "100")
        for name in ("FALAJ_URL", "FALAJ_TOKEN", "FALAJ_DEBUG"):
            patch.delenv(name, raising=False)
        yield CommandLine(folder, capsys)


@contextmanager
def restored_log() -> Iterator[None]:
    """Restore the log after commands in this process have redirected it to their own file."""
    log = logging.getLogger("falaj")
    before = log.handlers[:], log.level, log.propagate
    try:
        yield
    finally:
        for handler in set(log.handlers) - set(before[0]):
            handler.close()
        log.handlers[:], log.level, log.propagate = before


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a `falaj` in another process."""
    places = {"FALAJ_HOME": str(folder / "home"), "FALAJ_CONFIG_DIR": str(folder / "config")}
    return {**os.environ, **places, "PYTHONPATH": str(SOURCE)}


def make_template(folder: Path) -> Path:
    """Create a home to copy, which is faster than creating one for each test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        falaj.open(folder / "home").close()
    return folder
