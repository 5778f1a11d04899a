"""What runs on a home, and who may open it: stale traces, strangers' processes, other users, and those who only ask."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import CommandLine, command_line, make_template
from falaj.assembly import home as homes
from falaj.assembly.home import open_home
from falaj.errors import ConfigInvalid, HomeBusy


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


# ------------------------------------------------------------------------------------------- stale traces


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with us."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def leave_traces(home: Path, pid: int) -> None:
    """What a platform with that process id leaves when it is killed."""
    (home / "run.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": pid}))
    (home / "lock").write_text(str(pid))


def test_down_spares_a_stranger_who_has_the_process_id_now(
    falaj: CommandLine, stranger: subprocess.Popen[bytes]
) -> None:
    leave_traces(falaj.home, stranger.pid)

    ran = falaj("down")

    assert stranger.poll() is None
    assert (ran.status, ran.out) == (0, "no platform runs on this home\n")
    assert falaj("status").status == 1


def test_down_after_a_platform_that_was_killed(falaj: CommandLine, stranger: subprocess.Popen[bytes]) -> None:
    leave_traces(falaj.home, stranger.pid)
    stranger.kill()
    stranger.wait()

    assert falaj.done("down").out == "no platform runs on this home\n"
    assert falaj.done("users", "whoami").out  # on the home itself, not at the address that is left


def test_down_spares_a_stranger_while_somebody_else_has_the_home_open(
    falaj: CommandLine, stranger: subprocess.Popen[bytes]
) -> None:
    leave_traces(falaj.home, stranger.pid)

    with open_home(falaj.home).lock():  # as fj.open does, whose process is no platform that could be stopped
        ran = falaj("down")
        told = falaj("status", "--json").json

    assert stranger.poll() is None
    assert ran.out == "no platform runs on this home\n"
    assert (told["running"], told["url"]) == (False, None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "1", "url": 7}'])
def test_down_with_a_trace_that_cannot_be_read(falaj: CommandLine, text: str) -> None:
    (falaj.home / "run.json").write_text(text)
    (falaj.home / "lock").write_text("1")

    assert falaj.done("down").out == "no platform runs on this home\n"


# -------------------------------------------------------------------------------------------- other users


def give_away(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Make `path` another user's; who may not do that becomes another user instead."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        patch.setattr(os, "geteuid", lambda: 12345)


@pytest.mark.parametrize("what", [".", "falaj.toml"])
def test_what_belongs_to_another_user_is_not_opened(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (falaj.home / "falaj.toml").write_text("[server]\nport = 0\n")
    give_away(falaj.home / what, monkeypatch)

    with pytest.raises(ConfigInvalid, match="owned by user"):
        open_home(falaj.home)
    for command in (["status"], ["down"], ["up", "--port", "0"], ["users", "whoami"]):
        ran = falaj(*command)
        assert ran.status == 2, command
        assert "owned by user" in ran.err


def test_a_foreign_directory_is_not_made_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "theirs"
    place.mkdir(mode=0o755)
    give_away(place, monkeypatch)

    with pytest.raises(ConfigInvalid):
        open_home(place, tmp_path / "config")

    assert list(place.iterdir()) == []
    assert place.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("what", [".", "falaj.toml"])
def test_what_others_may_write_to_is_not_opened(falaj: CommandLine, what: str) -> None:
    (falaj.home / "falaj.toml").touch()
    (falaj.home / what).chmod(0o777)

    with pytest.raises(ConfigInvalid, match="mode"):
        open_home(falaj.home)


# ------------------------------------------------------------------------------------- who holds the home


def test_who_only_asks_does_not_keep_a_platform_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = open_home(tmp_path / "home", tmp_path / "config")
    asking = (home.path / "lock").open("a+")
    fcntl.flock(asking, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as Home.is_held does, for an instant
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        asking.close()

    monkeypatch.setattr(homes.time, "sleep", pause)
    with home.lock():
        assert home.is_held()

    assert len(pauses) == 1
    assert not home.is_held()


def test_who_holds_a_home_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = open_home(tmp_path / "home", tmp_path / "config")
    pauses: list[float] = []
    monkeypatch.setattr(homes.time, "sleep", pauses.append)

    with home.lock():
        with pytest.raises(HomeBusy):
            home.lock()
        assert (home.path / "lock").read_text() == str(os.getpid())

    assert 1 <= len(pauses) < homes.LOCK_TRIES
    assert sum(pauses) < 1  # nobody waits long to be told


def test_those_who_ask_do_not_take_each_other_for_a_holder(tmp_path: Path) -> None:
    home = open_home(tmp_path / "home", tmp_path / "config")

    with (home.path / "lock").open("a+") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH | fcntl.LOCK_NB)

        assert not home.is_held()
