"""The key file: its permissions, and that there is only ever one."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from falaj.drivers.keyfile.keys import KeyFile
from falaj.errors import AlreadyExists, KeyUnavailable

CONTEXT = b"workspace w"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys.json"


def test_it_is_created_readable_by_its_owner_only(path: Path) -> None:
    KeyFile.create(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_it_stays_readable_by_its_owner_only_when_rotated(path: Path) -> None:
    keys = KeyFile.create(path)

    keys.rotate()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_a_file_that_others_can_reach_is_refused_with_the_fix(path: Path, mode: int) -> None:
    KeyFile.create(path)
    path.chmod(mode)

    with pytest.raises(KeyUnavailable) as refusal:
        KeyFile.open(path)

    assert f"mode {mode:04o}" in str(refusal.value)
    assert f"chmod 600 {path}" in str(refusal.value)


def test_a_file_of_another_owner_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KeyFile.create(path)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    with pytest.raises(KeyUnavailable, match=f"owner {owner}"):
        KeyFile.open(path)


def test_a_link_to_a_file_is_refused(path: Path) -> None:
    KeyFile.create(path)
    link = path.with_name("link.json")
    link.symlink_to(path)

    with pytest.raises(KeyUnavailable, match="symbolic link"):
        KeyFile.open(link)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(KeyUnavailable, match=r"keys\.json cannot be read: No such file"):
        KeyFile.open(path)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"format": 1, "name": "x", "roots": [], "signing": "00"}']
)
def test_a_file_that_holds_something_else_is_refused(path: Path, content: str) -> None:
    KeyFile.create(path)
    path.write_text(content)

    with pytest.raises(KeyUnavailable, match="the key file is damaged"):
        KeyFile.open(path)


def test_a_second_create_keeps_the_first_key(path: Path) -> None:
    first = KeyFile.create(path)

    with pytest.raises(AlreadyExists):
        KeyFile.create(path)

    assert KeyFile.open(path).root == first.root


def test_eight_concurrent_first_starts_make_one_key(path: Path) -> None:
    with ThreadPoolExecutor(8) as starts:
        roots = set(starts.map(lambda _: KeyFile.open_or_create(path).root, range(8)))

    assert len(roots) == 1
    assert list(path.parent.iterdir()) == [path]


def test_concurrent_rotations_lose_no_key(path: Path) -> None:
    KeyFile.create(path)

    with ThreadPoolExecutor(8) as rotations:
        roots = list(rotations.map(lambda _: KeyFile.open(path).rotate(), range(8)))

    assert KeyFile.open(path).root.endswith("-9")
    assert max(roots) == KeyFile.open(path).root


def test_a_rotation_by_another_process_is_seen(path: Path) -> None:
    here, there = KeyFile.create(path), KeyFile.open(path)

    root = there.rotate()

    assert here.root == root
    assert here.unwrap(there.wrap(b"k" * 32, context=CONTEXT), context=CONTEXT) == b"k" * 32


def test_a_file_made_readable_for_others_while_in_use_is_refused(path: Path) -> None:
    keys = KeyFile.create(path)

    path.chmod(0o644)

    with pytest.raises(KeyUnavailable, match="chmod 600"):
        keys.wrap(b"k" * 32, context=CONTEXT)


def test_removing_the_file_in_use_removes_the_keys(path: Path) -> None:
    keys = KeyFile.create(path)
    wrapped = keys.wrap(b"k" * 32, context=CONTEXT)

    path.unlink()

    with pytest.raises(KeyUnavailable):
        keys.unwrap(wrapped, context=CONTEXT)


def test_next_writer_removes_the_draft_of_a_killed_one(path: Path) -> None:
    keys = KeyFile.create(path)
    leftover = path.with_name(f".{path.name}.0123")
    leftover.write_text("half a key")

    keys.rotate()

    assert not leftover.exists()
