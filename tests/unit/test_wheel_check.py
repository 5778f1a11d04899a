"""The check of the wheel finds the Pythons of a machine, each once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from check_wheel import find_pythons

OWN = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the system's Python, the folder of the test on the path, and no pyenv."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}")
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_python_is_found_once_behind_links_and_virtualenvs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("FALAJ_TEST_PYTHONS", str(tmp_path / "python3"))

    assert find_pythons().count(OWN) == 1


def test_what_is_too_old_or_does_not_start_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, broken = tmp_path / "python3.10", tmp_path / "python3.12"
    old.write_text("#!/bin/sh\necho 3 10 /old\n")
    broken.write_text("#!/bin/sh\nexit 127\n")
    for program in (old, broken):
        program.chmod(0o755)

    found = find_pythons()

    assert not {Path("/old"), old, broken} & set(found)


def test_named_pythons_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 3 14 /opt/python-3.14/bin/python3.14\n")
    program.chmod(0o755)
    monkeypatch.setenv("FALAJ_TEST_PYTHONS", f"{program}:{tmp_path / 'absent'}")

    assert find_pythons()[-1] == Path("/opt/python-3.14/bin/python3.14")
