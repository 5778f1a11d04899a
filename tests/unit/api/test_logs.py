"""Logs of the API as JSON lines without secrets, and metrics for operators and auditors."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from falaj.apps.logs import JsonLines, redact
from falaj.records.governance.identity import Role
from falaj.sdk.remote import redeem, remote_service
from interfaces import ServedPlatform
from polling import eventually
from probe import SECRET, Probe

PASSWORD = "hunter2-of-the-database"


class Lines(logging.Handler):
    """The lines that the log file would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record) + "\n"

    def parsed(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    def of(self, request: str) -> list[dict[str, Any]]:
        return [line for line in self.parsed() if line.get("request") == request]


@pytest.fixture
def log() -> Iterator[Lines]:
    """Yield everything that is logged meanwhile, at any level."""
    lines, root = Lines(), logging.getLogger()
    before = root.level
    root.addHandler(lines)
    root.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        root.removeHandler(lines)
        root.setLevel(before)


# ------------------------------------------------------------------------------------------------------ logs


def test_each_request_is_one_line_with_its_id(served: ServedPlatform, log: Lines) -> None:
    served.as_admin.get("/api/v1/zones/list", headers={"X-Request-ID": "req-1"})

    (line,) = eventually(lambda: log.of("req-1"))  # it is logged when the answer is written
    assert line["operation"] == "zones.list"
    assert line["status"] == 200
    assert line["level"] == "info"
    assert line["from"] == "remote:127.0.0.1"
    assert line["ms"] >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*\+00:00", line["at"])


def test_a_crash_is_logged_with_its_trace_and_request_and_not_shown_to_callers(
    served: ServedPlatform, log: Lines
) -> None:
    answer = served.as_admin.post("/api/v1/probe/crash", headers={"X-Request-ID": "req-2"})

    assert answer.status_code == 500
    assert answer.json()["details"] == {}
    assert SECRET not in answer.text
    trace = next(line["trace"] for line in log.of("req-2") if "trace" in line)
    assert "RuntimeError" in trace
    assert SECRET in trace


def test_a_crash_outside_the_gate_is_logged_too(
    served: ServedPlatform, log: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr("falaj.apps.api.app.typed_input", broken)

    answer = served.as_admin.get("/api/v1/zones/list", headers={"X-Request-ID": "req-3"})

    assert answer.status_code == 500
    assert answer.json()["code"] == "internal"
    assert SECRET not in answer.text
    assert any("ZeroDivisionError" in line.get("trace", "") for line in log.of("req-3"))


def test_a_stream_that_breaks_is_logged(served: ServedPlatform, log: Lines) -> None:
    with pytest.raises(Exception, match="log says why"):
        list(remote_service(Probe, served.platform.workspaces.gate).notes(count=2, end="crash"))

    assert any(SECRET in line.get("trace", "") for line in log.parsed())


def test_a_caller_who_disconnects_is_not_an_internal_error(served: ServedPlatform, log: Lines) -> None:
    with pytest.raises(RuntimeError, match="hung up"):
        served.as_admin.post("/api/v1/workspaces/create", content=hangs_up())

    assert [line for line in log.parsed() if line["level"] in ("error", "critical")] == []


def hangs_up() -> Iterator[bytes]:
    yield b'{"name": '
    raise RuntimeError("hung up")


def test_log_messages_cannot_break_lines(log: Lines) -> None:
    logging.getLogger("falaj.test").warning(
        "one\ntwo\u2028three %s", "four\r\n", extra={"odd": {1, 2}, "n": None}
    )

    assert log.text.count("\n") == len(log.parsed())
    ours = [line for line in log.parsed() if line["logger"] == "falaj.test"]  # a request may have just ended
    assert [line["message"] for line in ours] == ["one\ntwo\u2028three four\r\n"]


# --------------------------------------------------------------------------------------------------- secrets


def test_no_secret_reaches_the_log(served: ServedPlatform, log: Lines) -> None:
    issued = served.platform.tokens.issue(purpose="secret")
    link = served.platform.tokens.sign_in_link()
    used = redeem(served.url, link.code)
    client = served.http(issued.secret)
    client.get("/api/v1/users/whoami")
    client.post("/api/v1/probe/crash", json={"token": issued.secret})
    client.post("/api/v1/workspaces/create", json={"name": issued.secret})
    client.get("/api/v1/workspaces/show", params={"workspace": issued.secret})
    client.get(f"/nowhere/{issued.secret}")
    served.as_nobody.post("/signin", json={"code": link.code})
    served.as_nobody.post("/signin", content=f"code={link.code}")
    served.as_nobody.get("/api/v1/users/whoami", headers={"Authorization": f"Basic {issued.secret}"})
    served.platform.tokens.revoke(issued.token.id)
    client.get("/api/v1/users/whoami")

    assert log.text.count("request") > 10
    for secret in (issued.secret, link.code, used, served.admin):
        assert secret.rpartition(".")[2] not in log.text


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {PASSWORD}",
        f"authorization: bearer {PASSWORD}",
        f"fj_token_01m7ep7cc31kh8gr7hwwy6ak09.{PASSWORD}",
        f"http://127.0.0.1:7480/#code={PASSWORD}",
        f"postgresql://falaj:{PASSWORD}@db.internal:5432/falaj",
        f"postgresql+psycopg://falaj:{PASSWORD}@/falaj?host=/tmp",
        f"could not connect: redis://:{PASSWORD}@cache:6379/0",
        f"connection to server failed: user=falaj password={PASSWORD} host=db",
        f"connection to server failed: password='{PASSWORD}'",
    ],
)
def test_text_that_looks_like_a_secret_is_masked(text: str) -> None:
    line = redact(json.dumps({"message": text, "after": "it"}))

    assert PASSWORD not in line
    assert json.loads(line)["after"] == "it"


def test_text_without_secrets_is_not_changed() -> None:
    text = "there is no blob 'fj_report.csv' at http://127.0.0.1:7480/api, code 5; bearer of news"

    assert redact(text).startswith("there is no blob")
    assert "7480/api, code 5" in redact(text)


@pytest.mark.parametrize(
    "url", [f"postgresql://falaj:{PASSWORD}@127.0.0.1:1/falaj", f"postgresql://falaj:{PASSWORD}@[bad"]
)
@pytest.mark.slow
def test_a_process_that_cannot_start_does_not_print_its_password(tmp_path: Path, url: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "falaj.toml").write_text('[metadata]\ndriver = "postgres"\nurl = "env:DATABASE_URL"\n')
    places = {"FALAJ_HOME": str(home), "FALAJ_CONFIG_DIR": str(tmp_path / "config"), "DATABASE_URL": url}
    command = [sys.executable, "-m", "falaj.apps.api.server", "127.0.0.1", "0"]

    done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, check=False)

    assert done.returncode != 0
    written = done.stdout + done.stderr + "".join(p.read_text() for p in (home / "logs").iterdir())
    assert written
    assert PASSWORD not in written


# --------------------------------------------------------------------------------------------------- metrics


def counted(served: ServedPlatform, token: str, operation: str, status: int) -> float:
    text = served.http(token).get("/metrics").text
    pattern = rf'^falaj_requests_total{{operation="{operation}",status="{status}"}} (\S+)$'
    found = re.search(pattern, text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_metrics_count_requests_by_operation_and_status(served: ServedPlatform) -> None:
    before = counted(served, served.admin, "workspaces.show", 404)

    for _ in range(3):
        served.as_admin.get("/api/v1/workspaces/show?workspace=nowhere")

    assert counted(served, served.admin, "workspaces.show", 404) == before + 3


def test_metrics_are_for_operators_and_auditors(served: ServedPlatform) -> None:
    platform = served.platform
    for name, role in (("olga", Role.OPERATOR), ("adam", Role.AUDITOR), ("vera", Role.VIEWER)):
        platform.users.create(name)
        platform.workspaces.grant("platform", name, role=role)
    statuses = {
        name: served.http(served.issue(user=name)).get("/metrics").status_code
        for name in ("olga", "adam", "vera", "dana", "sam")
    }

    assert statuses == {"olga": 200, "adam": 200, "vera": 403, "dana": 403, "sam": 403}
    assert served.as_nobody.get("/metrics").status_code == 401


def test_metrics_are_the_same_on_every_interface(served: ServedPlatform) -> None:
    scraped = served.as_admin.get("/metrics")

    assert scraped.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE falaj_requests_total counter" in scraped.text
    assert "# TYPE falaj_request_seconds histogram" in served.platform.platform.metrics().text


def test_caller_input_creates_no_metric_series(served: ServedPlatform) -> None:
    served.as_admin.get("/invented/by/a/caller")
    served.as_admin.get("/api/v1/invented/verb", headers={"X-Request-ID": "invented"})

    assert "invented" not in served.as_admin.get("/metrics").text
