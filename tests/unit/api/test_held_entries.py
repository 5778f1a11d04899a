"""Audit entries of reads are committed while the response is made, and before it leaves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from falaj.errors import Unavailable
from falaj.governance.audit.log import Draft
from interfaces import ServedPlatform
from polling import PATIENCE_S

NATIVE, MLFLOW = "/api/v1/runs/list", "/api/2.0/mlflow/runs/search"


def read(served: ServedPlatform, path: str) -> httpx.Response:
    return served.as_admin.post(path, json={})


def actions(served: ServedPlatform) -> list[str]:
    return [each.action for each in served.platform.audit.list(action="runs.list", limit=1000).items]


@pytest.mark.parametrize("path", [NATIVE, MLFLOW])
def test_a_response_leaves_when_its_entry_is_committed(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    audit, commits, may_commit = served.parts.audit, threading.Event(), threading.Event()
    before, append = len(actions(served)), audit.append

    def late(tx: Any, drafts: Sequence[Draft]) -> int:
        commits.set()
        assert may_commit.wait(PATIENCE_S)
        return append(tx, drafts)

    monkeypatch.setattr(audit, "append", late)
    with ThreadPoolExecutor(1) as beside:
        response = beside.submit(read, served, path)
        assert commits.wait(PATIENCE_S)
        assert served.as_admin.get("/healthz").status_code == 200  # which came later, and was answered
        assert not response.done()
        may_commit.set()
        assert response.result(PATIENCE_S).status_code == 200

    assert len(actions(served)) == before + 1


@pytest.mark.parametrize("path", [NATIVE, MLFLOW])
def test_a_read_whose_entry_is_lost_is_not_answered(
    served: ServedPlatform, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def fail(_tx: Any, _drafts: Sequence[Draft]) -> int:
        raise Unavailable("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(served.parts.audit, "append", fail)
        refused = read(served, path)

    assert refused.status_code == 503
    assert "items" not in refused.json()
    assert "runs" not in refused.json()
    assert read(served, path).status_code == 200
