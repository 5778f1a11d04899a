"""The machine that jobs run on: what of it they do not see, and how much they may save there."""

from __future__ import annotations

from pathlib import Path

import pytest

from falaj.assembly.compute import allowance_in, secret_files
from falaj.assembly.home import open_home
from falaj.control.jobs.storage_limits import CHECKPOINT_BYTES, StorageLimits
from falaj.records.config import Config


def test_secrets_that_lie_elsewhere_are_kept_from_jobs() -> None:
    tls = {"certificate": "/usr/local/tls/cert.pem", "key": "/usr/local/tls/key.pem"}
    config = Config.model_validate(
        {
            "server": {"tls": tls},
            "metadata": {"driver": "postgres", "url": "file:/usr/local/falaj/url"},
            "keys": {"path": "keys.json"},
            "zones": {
                "far": {
                    "jurisdiction": "AE",
                    "blobs": {"driver": "s3", "bucket": "b", "access_key": "env:A", "secret_key": "file:/s"},
                }
            },
        }
    )

    hidden = set(secret_files(config))

    assert hidden == {
        Path("/usr/local/tls/key.pem"),
        Path("/usr/local/falaj/url"),
        Path.cwd() / "keys.json",
        Path("/s"),
    }


def test_nothing_else_is_hidden_where_nothing_is_named() -> None:
    assert secret_files(Config()) == ()


@pytest.mark.parametrize(
    ("blobs", "limit", "disk"),
    [
        ({}, None, "home/blobs"),
        ({"path": "/elsewhere"}, "200GiB", "/elsewhere"),
        ({"driver": "s3", "bucket": "b"}, 1 << 30, None),
    ],
    ids=str,
)
def test_what_a_job_may_save_follows_from_where_blobs_lie(
    tmp_path: Path, blobs: dict[str, str], limit: str | int | None, disk: str | None
) -> None:
    jobs = {} if limit is None else {"checkpoint_limit": limit}
    config = Config.model_validate({"jobs": jobs, "zones": {"a": {"jurisdiction": "AE", "blobs": blobs}}})

    found = allowance_in("a", config, open_home(tmp_path / "home", tmp_path / "config"))

    expected = {None: CHECKPOINT_BYTES, "200GiB": 200 << 30}.get(limit, limit)  # type: ignore[arg-type]
    assert found == StorageLimits(expected, disk=disk and tmp_path / disk)  # type: ignore[arg-type]
