"""What the API answered is in the audit log, and what it acknowledged is stored, when it is killed at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

import falaj as fj
from falaj.records.governance.identity import Role
from polling import eventually

CLIENTS = 12


@pytest.mark.slow
def test_nothing_answered_is_lost_when_the_api_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    with fj.open(tmp_path / "home") as platform:
        platform.users.create("dana")
        platform.workspaces.grant("default", "dana", role=Role.DEVELOPER)
        token = platform.tokens.issue(user="dana", purpose="test").secret
        run = platform.runs.start("killed").id
    answered: list[str] = []
    started: list[str] = []

    with api(tmp_path) as (url, process):
        threads = [
            threading.Thread(target=ask, args=(url, token, run, number, answered, started))
            for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: len(answered) > 400 or None)
        process.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join()

    with fj.open(tmp_path / "home") as platform:
        with platform.runs.gate.database.read() as tx:
            entries = [
                json.loads(row[0]) for row in tx.execute_sql("SELECT entry FROM governance_audit_entries")
            ]
        recorded = {entry.get("request") for entry in entries if entry["outcome"] == "done"}
        found = {each.id for each in platform.runs.list(experiments=("killed",), limit=1000).items}
        *_, verdict = platform.audit.verify(deep=True)
    assert not set(answered) - recorded
    assert not set(started) - found
    assert verdict.ok, verdict.problems


def ask(url: str, token: str, run: str, number: int, answered: list[str], started: list[str]) -> None:
    """Send requests until the server is gone; note the ids of those that it answered."""
    headers = {"Authorization": f"Bearer {token}"}
    with suppress(httpx.HTTPError), httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
        for count in range(100_000):
            ident = f"req-{number}-{count}"
            path, body = "runs/show", {"run": run}
            if count % 4 == 3:
                path, body = "runs/start", {"experiment": "killed"}
            response = client.post(f"/api/v1/{path}", json=body, headers={"X-Request-ID": ident})
            assert response.status_code == 200, response.text
            answered.append(ident)
            if path == "runs/start":
                started.append(response.json()["id"])


@contextmanager
def api(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run the process of the API alone on a home; yield its address."""
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", "falaj.apps.api.server", "127.0.0.1", "0"]
    places = {"FALAJ_HOME": str(folder / "home"), "FALAJ_CONFIG_DIR": str(folder / "config")}
    variables = {**os.environ, **places, "FALAJ_READY_FD": str(theirs)}
    with subprocess.Popen(command, env=variables, pass_fds=[theirs], stdin=subprocess.PIPE) as process:
        try:
            os.close(theirs)
            with os.fdopen(ours) as ready:
                yield json.load(ready)["url"], process
        finally:
            process.kill()
