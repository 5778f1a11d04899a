"""The node that jobs run on: paths hidden from jobs, and limits on what they save."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from falaj.assembly import compute
from falaj.assembly.compute import LocalCompute, allowance_in, secret_files
from falaj.assembly.home import open_home
from falaj.control.jobs.storage_limits import CHECKPOINT_BYTES, StorageLimits
from falaj.ports.sandbox import MachineFacts
from falaj.records.config import Config


def test_secrets_outside_the_home_are_hidden_from_jobs() -> None:
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


def test_nothing_else_is_hidden_without_configuration() -> None:
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
def test_checkpoint_limit_follows_from_the_blob_store(
    tmp_path: Path, blobs: dict[str, str], limit: str | int | None, disk: str | None
) -> None:
    jobs = {} if limit is None else {"checkpoint_limit": limit}
    config = Config.model_validate({"jobs": jobs, "zones": {"a": {"jurisdiction": "AE", "blobs": blobs}}})

    found = allowance_in("a", config, open_home(tmp_path / "home", tmp_path / "config"))

    expected = {None: CHECKPOINT_BYTES, "200GiB": 200 << 30}.get(limit, limit)  # type: ignore[arg-type]
    assert found == StorageLimits(expected, disk=disk and tmp_path / disk)  # type: ignore[arg-type]


BARE = MachineFacts(is_root=False, python="/opt/python")


@pytest.mark.parametrize(
    ("facts", "users", "settings", "is_refused"),
    [
        (BARE, 1, {}, False),
        (BARE, 2, {}, True),
        (BARE, 2, {"isolation": "none"}, False),
        (BARE, 1, {"isolation": "landlock"}, True),
        (replace(BARE, landlock_abi=7, landlock_works=True), 2, {}, False),
    ],
)
def test_platform_reports_in_one_line_why_it_refuses_jobs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    facts: MachineFacts,
    users: int,
    settings: dict[str, str],
    is_refused: bool,
) -> None:
    monkeypatch.setattr(compute, "count_users", lambda _: users)
    monkeypatch.setattr("falaj.drivers.sandbox.probe", lambda: facts)
    home = open_home(tmp_path / "home", tmp_path / "config")
    database: Any = SimpleNamespace(read=nullcontext)
    zone: Any = None
    bench = LocalCompute(home, Config.model_validate(settings), database, zone)

    refusal = bench.refusal()

    assert (refusal is not None) == is_refused
    assert refusal is None or ("\n" not in refusal and refusal.startswith("jobs are refused: "))
