"""Small files of a table are merged and removed; what the audit log says of earlier versions stays provable."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from backup_harness import fill, put_rows
from falaj.drivers.deltalake import tables as delta_tables
from platforms import OwnPlatform


@pytest.fixture(autouse=True)
def _few_files_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_tables, "MERGED_FILES", 3)


def merge(platform: OwnPlatform) -> None:
    """Ingest so often that small files are merged."""
    for number in range(4):
        platform.features.ingest("facts", data=put_rows(platform, f"more-{number}", [("c", float(number))]))


def files_of(platform: OwnPlatform) -> set[Path]:
    return set((platform.home.path / "tables").rglob("*.parquet"))


@pytest.mark.slow
def test_a_cleanup_of_merged_files_is_not_taken_for_an_attack(light_platform: OwnPlatform) -> None:
    fill(light_platform)
    merge(light_platform)
    light_platform.features.materialize("facts")
    light_platform.clock.advance(timedelta(days=3))

    removed = light_platform.features.cleanup().files

    assert removed > 0
    assert light_platform.verify_audit(deep=True).problems == ()


@pytest.mark.slow
def test_a_merged_file_that_a_training_set_was_made_from_is_still_checked(
    light_platform: OwnPlatform,
) -> None:
    fill(light_platform)
    view = light_platform.features.show("facts")
    (pinned,) = [path for path in files_of(light_platform) if view.id in str(path)]
    merge(light_platform)
    light_platform.features.materialize("facts")
    raw = bytearray(pinned.read_bytes())
    raw[len(raw) // 2] ^= 1
    pinned.write_bytes(raw)

    (problem,) = light_platform.verify_audit(deep=True).problems

    assert pinned.name in problem
