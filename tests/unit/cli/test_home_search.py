"""Which home a command means: the one named, the nearest above this folder, and never someone else's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import CommandLine, command_line
from falaj.records.places import default_home, nearest_home

STRANGER = 12345


@pytest.fixture
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: two folders below one with a home."""
    (tmp_path / ".falaj").mkdir()
    folder = tmp_path / "project" / "notebooks"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FALAJ_HOME", raising=False)
    return folder


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")


def test_the_nearest_home_above_is_found(below: Path, tmp_path: Path) -> None:
    assert default_home() == tmp_path / ".falaj"

    (below.parent / ".falaj").mkdir()
    assert default_home() == below.parent / ".falaj"

    (below / ".falaj").mkdir()
    assert default_home() == Path(".falaj")


def test_a_named_home_is_not_searched(below: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_HOME", "other")

    assert default_home() == Path("other")


def test_a_file_is_no_home(below: Path) -> None:
    (below.parent / ".falaj").write_text("")

    assert default_home() == below.parents[1] / ".falaj"


@pytest.mark.parametrize("given_away", ["project", "project/notebooks", "."])
def test_the_search_ends_at_a_folder_of_someone_else(below: Path, tmp_path: Path, given_away: str) -> None:
    needs_root()
    os.chown(tmp_path / given_away, STRANGER, -1)

    assert nearest_home() is None
    assert default_home() == Path(".falaj")


def test_a_home_of_someone_else_is_passed_over(below: Path, tmp_path: Path) -> None:
    needs_root()
    theirs = below.parent / ".falaj"
    theirs.mkdir()
    os.chown(theirs, STRANGER, -1)

    assert default_home() == tmp_path / ".falaj"


def test_a_link_of_someone_else_to_a_home_of_ours_is_passed_over(below: Path, tmp_path: Path) -> None:
    needs_root()
    ours = tmp_path / "elsewhere"
    ours.mkdir()
    (below.parent / ".falaj").symlink_to(ours)
    os.lchown(below.parent / ".falaj", STRANGER, -1)

    assert default_home() == tmp_path / ".falaj"

    os.lchown(below.parent / ".falaj", os.geteuid(), -1)
    assert default_home() == below.parent / ".falaj"


def test_a_folder_that_was_removed_has_no_home(below: Path) -> None:
    below.rmdir()

    assert default_home() == Path(".falaj")


@pytest.fixture
def falaj(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys) as line, pytest.MonkeyPatch.context() as patch:
        patch.delenv("FALAJ_HOME")
        yield line


def test_commands_find_the_home_above_and_init_makes_one_here(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    falaj.done("init", "--bare")
    falaj.done("workspaces", "create", "risk")
    (falaj.folder / "project").mkdir()
    monkeypatch.chdir(falaj.folder / "project")

    assert falaj.done("workspaces", "show", "risk").err == ""
    assert falaj("status", "--json").json["home"] == str(falaj.folder / ".falaj")

    falaj.done("init", "--bare")
    assert falaj("workspaces", "show", "risk").status == 1
