"""`falaj backup` and `falaj restore` on the command line: what they say, and their exit status."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import CommandLine, command_line


@pytest.fixture
def falaj(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys) as line:
        (tmp_path / "figures.txt").write_text("quarterly figures")
        assert line("blobs", "put", str(tmp_path / "figures.txt"), "figures").status == 0
        yield line


def test_a_backup_is_checked_and_restored_by_the_public_key(falaj: CommandLine, tmp_path: Path) -> None:
    backups, config = str(tmp_path / "backups"), tmp_path / "config"
    key = falaj.json("audit", "key")["ed25519"]
    assert falaj("backup", backups, "--keys", str(tmp_path / "safe")).status == 0
    shutil.rmtree(falaj.home)
    kept = next((config / "keys").glob("home_*.json"))
    kept.rename(tmp_path / "elsewhere.json")

    unknown = falaj("restore", backups, "--check")
    refused = falaj("restore", backups)
    wrong = falaj("restore", backups, "--check", "--public-key", "0" * 64)
    odd = falaj("restore", backups, "--public-key", "no-key")
    known = falaj("restore", backups, "--check", "--public-key", key)
    done = falaj("restore", backups, "--keys", str(tmp_path / "safe"))

    assert (unknown.status, "nothing here says whether" in unknown.out) == (0, True)
    assert (refused.status, "--public-key KEY" in refused.err) == (1, True)
    assert (wrong.status, "these are other keys" in wrong.err) == (1, True)
    assert (odd.status, "64 hex digits" in odd.err) == (2, True)
    assert (known.status, known.out.count("\n")) == (0, 1)
    assert done.status == 0, done.err
    assert falaj("blobs", "get", "figures", "-").out == "quarterly figures"
