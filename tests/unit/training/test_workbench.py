"""The machine that jobs run on: what of it they do not see."""

from __future__ import annotations

from pathlib import Path

from falaj.assembly.workbench import secret_files
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
