"""The owner of a home never locks themselves out: their token is renewed before it ends, and after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from command_line import CommandLine, command_line, make_template
from falaj.apps.cli.session import local_platform
from falaj.assembly import owner
from falaj.assembly.home import Home, open_home
from falaj.errors import Unauthenticated
from falaj.records.record import utc_now
from falaj.sdk import credentials

URL = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


@pytest.fixture
def running(falaj: CommandLine) -> Iterator[Home]:
    """A home that a platform holds; nobody answers at its address."""
    home = open_home(falaj.home)
    with home.lock() as lock:
        lock.seek(0)
        home.running.write_text(json.dumps({"url": URL, "pid": int(lock.read())}))
        yield home


def saved() -> tuple[str, datetime]:
    found = json.loads(credentials.credentials_file().read_text())[URL]
    return found["token"], datetime.fromisoformat(found["expires_at"])


@pytest.mark.parametrize("left", [timedelta(days=6), timedelta(days=-1), timedelta(days=-400)])
def test_a_token_that_ends_is_renewed(running: Home, left: timedelta) -> None:
    credentials.save(URL, "fj_old", expires_at=utc_now() + left)

    local_platform(running.path).close()

    token, until = saved()
    assert token.startswith("fj_token_")
    assert until > utc_now() + timedelta(days=29)


def test_a_token_that_is_lost_is_renewed(running: Home) -> None:
    local_platform(running.path).close()

    assert saved()[0].startswith("fj_token_")


def test_a_token_that_does_not_end_soon_stays(running: Home) -> None:
    credentials.save(URL, "fj_old", expires_at=utc_now() + timedelta(days=8))

    local_platform(running.path).close()

    assert saved()[0] == "fj_old"


def test_a_token_that_was_given_is_used(running: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_TOKEN", "fj_given")

    local_platform(running.path).close()

    assert not credentials.credentials_file().exists()


def test_a_valid_token_is_used_where_it_cannot_be_renewed(
    running: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_home: Home) -> None:
        raise Unauthenticated("no")

    monkeypatch.setattr(owner, "renew_owner_token", fail)
    credentials.save(URL, "fj_old", expires_at=utc_now() + timedelta(days=2))

    local_platform(running.path).close()

    assert saved()[0] == "fj_old"


def test_login_without_an_address_gets_the_owner_a_new_token(running: Home, falaj: CommandLine) -> None:
    credentials.save(URL, "fj_revoked", expires_at=utc_now() + timedelta(days=20))

    ran = falaj.done("login")

    assert saved()[0] != "fj_revoked"
    assert "signed in to" in ran.out


def test_a_renewal_is_recorded(running: Home, falaj: CommandLine) -> None:
    local_platform(running.path).close()
    running.running.unlink()
    (running.path / "lock").unlink()

    entries = falaj.json("audit", "list", "--action", "tokens.issue")["items"]

    assert [entry["origin"] for entry in entries] == ["local"]
