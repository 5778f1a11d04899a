"""The folder that keeps other users from a program is the one behind the links, not the link."""

from __future__ import annotations

from pathlib import Path

import pytest

from falaj.drivers.sandbox.facts import find_blocked, way_to


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """env/bin/python leads through current to real/3.11/bin/python; everyone may pass all of it."""
    tmp_path.chmod(0o755)
    (tmp_path / "real" / "3.11" / "bin").mkdir(parents=True, mode=0o755)
    (tmp_path / "env" / "bin").mkdir(parents=True, mode=0o755)
    program = tmp_path / "real" / "3.11" / "bin" / "python"
    program.touch(0o755)
    (tmp_path / "current").symlink_to("real/../real/3.11")
    (tmp_path / "env" / "bin" / "python").symlink_to(tmp_path / "current" / "bin" / "python")
    return tmp_path


@pytest.mark.parametrize("blocked", ["real", "real/3.11", "real/3.11/bin", "real/3.11/bin/python", "env/bin"])
def test_the_folder_behind_a_link_is_named(tree: Path, blocked: str) -> None:
    (tree / blocked).chmod(0o700)

    passed = [each for each in way_to(tree / "env" / "bin" / "python") if each.is_relative_to(tree)]

    assert tree / blocked in passed
    assert not any(each.is_symlink() for each in passed)
    assert next(each for each in passed if not each.stat().st_mode & 1) == tree / blocked


def test_a_way_that_everyone_may_pass_is_not_blocked() -> None:
    assert find_blocked(Path("/usr/bin/env")) is None


def test_a_circle_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    assert len([*way_to(tmp_path / "a")]) < 200
