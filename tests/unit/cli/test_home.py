"""Commands about the home and the machine: config, doctor, status."""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine, CommandResult, command_line, make_template
from falaj.apps.cli.commands.config import toml_lines
from falaj.assembly.config import read_config
from falaj.assembly.home import open_home
from falaj.records.config import Config, ServerConfig

BROKEN = 'port = 3\n[zones.uae]\njurisdiction = "uae"\n'
CUSTOM = """
policies = ["policies/*.cedar"]
[server]
port = 0
[zones.abu-dhabi]
jurisdiction = "AE"
default = true
[zones."frankfurt.1"]
jurisdiction = "DE"
blobs = {driver = "s3", bucket = "models", endpoint = "http://127.0.0.1:1"}
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


@pytest.fixture
def nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    """The command line without a home."""
    with command_line(tmp_path, capsys) as line:
        yield line


def findings(ran: CommandResult) -> dict[str, Any]:
    """Return the findings of the doctor by check, the worst of each."""
    ranks = {"ok": 0, "warn": 1, "fail": 2}
    worst: dict[str, Any] = {}
    for finding in ran.json:
        known = worst.get(finding["check"])
        if known is None or ranks[finding["status"]] > ranks[known["status"]]:
            worst[finding["check"]] = finding
    return worst


# ----------------------------------------------------------------------------------------------- config


def test_config_shows_every_default(falaj: CommandLine) -> None:
    shown = falaj.done("config", "show").out

    assert Config.model_validate(tomllib.loads(shown)) == Config()
    assert "port = 7480  # default" in shown


def test_config_show_prints_a_valid_falaj_toml(falaj: CommandLine) -> None:
    (falaj.home / "falaj.toml").write_text(CUSTOM)

    shown = falaj.done("config", "show").out

    assert Config.model_validate(tomllib.loads(shown)) == read_config(falaj.home / "falaj.toml")
    assert "port = 0\n" in shown
    assert '[zones."frankfurt.1".blobs]' in shown
    assert falaj.json("config", "show")["server"]["port"] == 0


def test_config_check_names_every_fault_with_its_line(falaj: CommandLine) -> None:
    (falaj.home / "falaj.toml").write_text(BROKEN)

    ran = falaj("config", "check")

    assert ran.status == 2
    assert ran.err.startswith("error[config.invalid] ")
    assert "falaj.toml:1 port\n" in ran.err
    assert "falaj.toml:3 zones.uae.jurisdiction\n" in ran.err


def test_config_check_of_a_file(nothing: CommandLine) -> None:
    (nothing.folder / "other.toml").write_text(CUSTOM)

    assert nothing.done("config", "check", "other.toml").out.startswith("other.toml is valid: 2 zone")
    assert nothing("config", "check", "nowhere.toml").status == 2
    assert nothing.done("config", "check").out.startswith("there is no ")
    assert not nothing.home.exists()


def test_values_of_every_kind_are_toml() -> None:
    config = Config(policies=('a"b\n', "ü"), server=ServerConfig(port=0))

    assert Config.model_validate(tomllib.loads("\n".join(toml_lines(config)))) == config


# ----------------------------------------------------------------------------------------------- doctor


@pytest.mark.slow
def test_a_fresh_home_has_no_problems(falaj: CommandLine) -> None:
    (falaj.home / "falaj.toml").write_text("[server]\nport = 0\n")

    ran = falaj.done("doctor", "--json")

    found = findings(ran)
    well = {
        "python",
        "config",
        "home",
        "keys",
        "metadata",
        "zone local",
        "platform",
        "port",
        "clock",
        "extras",
    }
    assert {check for check in well if found[check]["status"] != "ok"} == set()
    assert "encrypted" in found["encryption"]["words"]
    assert "isolation" in found
    assert not list((falaj.home / "blobs" / "local").glob("doctor*"))
    assert falaj.done("doctor").out.splitlines()[-1].startswith("0 failures")


def test_doctor_creates_no_home(nothing: CommandLine) -> None:
    found = findings(nothing("doctor", "--json"))

    assert "falaj up makes it" in found["home"]["words"]
    assert {found[check]["status"] for check in ("home", "keys", "metadata", "zone local")} == {"ok"}
    assert not nothing.home.exists()


@pytest.mark.slow
def test_doctor_names_each_problem_and_its_fix(falaj: CommandLine) -> None:
    falaj.key_file.chmod(0o644)
    falaj.home.chmod(0o755)
    (falaj.home / "falaj.toml").write_text(BROKEN)

    ran = falaj("doctor", "--json")

    found = findings(ran)
    assert ran.status == 1
    assert found["keys"]["status"] == "fail"
    assert found["keys"]["fix"] == f"chmod 600 {falaj.key_file}"
    assert found["home"] == found["home"] | {"status": "warn", "fix": f"chmod 700 {falaj.home}"}
    assert [each["status"] for each in ran.json if each["check"] == "config"] == ["fail", "fail"]
    assert f"fix: chmod 600 {falaj.key_file}" in falaj("doctor").out


@pytest.mark.slow
def test_doctor_finds_a_key_file_that_is_missing_or_in_the_home(falaj: CommandLine) -> None:
    inside = falaj.home / "keys.json"
    falaj.key_file.rename(inside)

    gone = findings(falaj("doctor", "--json"))["keys"]
    (falaj.home / "falaj.toml").write_text(f'[keys]\ndriver = "keyfile"\npath = "{inside}"\n')
    moved = findings(falaj("doctor", "--json"))["keys"]

    assert gone["status"] == "fail"
    assert "offline" in gone["fix"]
    assert moved["status"] == "warn"
    assert "lies in the home" in moved["words"]


@pytest.mark.slow
def test_a_damaged_database_is_found(falaj: CommandLine) -> None:
    (falaj.home / "falaj.db").write_bytes(b"not a database" * 100)

    found = findings(falaj("doctor", "--json"))

    assert found["metadata"]["status"] == "fail"
    assert found["isolation"]


def test_doctor_finds_an_unreachable_bucket_and_an_invalid_policy(falaj: CommandLine) -> None:
    (falaj.home / "falaj.toml").write_text(CUSTOM)
    policies = falaj.home / "policies"
    policies.mkdir()
    (policies / "p.cedar").write_text("permit (")

    ran = falaj("doctor", "--json")

    found = findings(ran)
    assert ran.status == 1
    assert found["zone frankfurt.1"]["status"] == "fail"
    assert found["zone abu-dhabi"]["status"] == "ok"
    assert found["policies"]["status"] == "fail"


def test_doctor_finds_a_clock_behind_the_database(falaj: CommandLine) -> None:
    ahead = (falaj.home / "falaj.db").stat().st_mtime + 10**6
    os.utime(falaj.home / "falaj.db", (ahead, ahead))

    assert findings(falaj("doctor", "--json"))["clock"]["status"] == "fail"


def test_doctor_finds_a_taken_port(falaj: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (falaj.home / "falaj.toml").write_text(f"[server]\nport = {port}\n")

        found = findings(falaj("doctor", "--json"))

    assert found["port"]["status"] == "fail"
    assert "--port" in found["port"]["fix"]


def test_a_running_platform_is_named(falaj: CommandLine) -> None:
    home = open_home(falaj.home)
    home.running.write_text(f'{{"url": "http://127.0.0.1:7480", "pid": {os.getpid()}}}')

    with home.lock():
        found = findings(falaj("doctor", "--json"))

    assert found["platform"]["words"] == "one runs at http://127.0.0.1:7480"
    assert "port" not in found


# ----------------------------------------------------------------------------------------------- status


def test_status_without_a_running_platform(falaj: CommandLine) -> None:
    ran = falaj("status")

    assert ran.status == 1
    assert ran.out == f"no platform runs on {falaj.home}\n  next   falaj up\n"
    assert falaj("status", "--json").json["running"] is False


def test_commands_for_this_machine_take_no_url(falaj: CommandLine) -> None:
    for command in ("up", "status", "down", "doctor"):
        assert falaj("--url", "http://127.0.0.1:1", command).status == 2


# ------------------------------------------------------------------------------------------------ login


@pytest.mark.parametrize("typed", ["http://127.0.0.1:1", "http://127.0.0.1:1#code=abc --token"])
def test_login_takes_a_link_or_a_token(falaj: CommandLine, typed: str) -> None:
    ran = falaj("login", *typed.split())

    assert ran.status == 2
    assert "a sign-in link (URL#code=…), or an address and --token" in ran.err


def test_login_by_link(falaj: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    logins: list[tuple[str, str]] = []

    def sign_in(url: str, code: str) -> tuple[str, str]:
        logins.append((url, code))
        return url, "sara"

    monkeypatch.setattr("falaj.apps.cli.commands.login.sign_in", sign_in)

    ran = falaj.done("login", "http://127.0.0.1:7480/#code=abc")

    assert logins == [("http://127.0.0.1:7480", "abc")]
    assert ran.out.startswith("signed in to http://127.0.0.1:7480 as sara\n")
