"""Which platform runs on a home, and who may open it: stale files, reused process ids, other users, and lock checks."""

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
from falaj.errors import ConfigInvalid, Damaged, HomeBusy


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


# -------------------------------------------------------------------------------------------- stale files


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is unrelated to the platform."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def leave_traces(home: Path, pid: int) -> None:
    """Write the files that a killed platform with that process id leaves."""
    (home / "run.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": pid}))
    (home / "lock").write_text(str(pid))


def test_down_does_not_kill_a_process_that_reuses_the_id(
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
    assert falaj.done("users", "whoami").out  # from the home itself, not at the address that is left


def test_down_does_not_kill_another_process_while_the_home_is_open_elsewhere(
    falaj: CommandLine, stranger: subprocess.Popen[bytes]
) -> None:
    leave_traces(falaj.home, stranger.pid)

    with open_home(falaj.home).lock():  # as fj.open does, whose process is no platform that could be stopped
        ran = falaj("down")
        status = falaj("status", "--json").json

    assert stranger.poll() is None
    assert ran.out == "no platform runs on this home\n"
    assert (status["running"], status["url"]) == (False, None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "1", "url": 7}'])
def test_down_with_an_unreadable_run_file(falaj: CommandLine, text: str) -> None:
    (falaj.home / "run.json").write_text(text)
    (falaj.home / "lock").write_text("1")

    assert falaj.done("down").out == "no platform runs on this home\n"


# -------------------------------------------------------------------------------------------- other users


def give_away(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Change the owner of `path`; without the permission to do so, run as another user instead."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        patch.setattr(os, "geteuid", lambda: 12345)


@pytest.mark.parametrize("what", [".", "falaj.toml"])
def test_a_home_of_another_user_is_not_opened(
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


def test_a_directory_with_other_files_is_not_made_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "theirs"
    place.mkdir(mode=0o755)
    give_away(place, monkeypatch)

    with pytest.raises(ConfigInvalid):
        open_home(place, tmp_path / "config")

    assert list(place.iterdir()) == []
    assert place.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("what", [".", "falaj.toml"])
def test_a_home_that_others_can_write_is_not_opened(falaj: CommandLine, what: str) -> None:
    (falaj.home / "falaj.toml").touch()
    (falaj.home / what).chmod(0o777)

    with pytest.raises(ConfigInvalid, match="mode"):
        open_home(falaj.home)


# ------------------------------------------------------------------------------------- the lock of a home


def test_a_lock_check_does_not_keep_a_platform_from_starting(
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


def test_the_holder_of_a_home_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = open_home(tmp_path / "home", tmp_path / "config")
    pauses: list[float] = []
    monkeypatch.setattr(homes.time, "sleep", pauses.append)

    with home.lock():
        with pytest.raises(HomeBusy):
            home.lock()
        assert (home.path / "lock").read_text() == str(os.getpid())

    assert 1 <= len(pauses) < homes.LOCK_TRIES
    assert sum(pauses) < 1  # the refusal comes quickly


def test_concurrent_lock_checks_do_not_report_each_other_as_holders(tmp_path: Path) -> None:
    home = open_home(tmp_path / "home", tmp_path / "config")

    with (home.path / "lock").open("a+") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH | fcntl.LOCK_NB)

        assert not home.is_held()


# -------------------------------------------------------------------------------------- the id of a home


@pytest.mark.parametrize(
    "arguments", [("blobs", "list"), ("status",), ("down",), ("up",), ("backup", "backups")], ids=" ".join
)
def test_a_home_that_lost_its_id_is_refused_with_the_way_back(
    falaj: CommandLine, arguments: tuple[str, ...]
) -> None:
    falaj.done("blobs", "list")
    ident = (falaj.home / "id").read_text()
    (falaj.home / "id").unlink()

    ran = falaj(*arguments)

    assert ran.status == 1
    assert not (falaj.home / "id").exists()
    assert f"echo {ident.strip()} > {falaj.home / 'id'}" in ran.err


def test_the_way_back_works(falaj: CommandLine) -> None:
    falaj.done("blobs", "list")
    ident = (falaj.home / "id").read_text()
    (falaj.home / "id").unlink()
    (fix,) = (line for line in falaj("blobs", "list").err.splitlines() if "echo" in line)

    subprocess.run(fix.partition("fix")[2], shell=True, check=True)

    assert (falaj.home / "id").read_text() == ident
    assert falaj("audit", "verify").status == 0


def test_doctor_says_that_the_id_is_gone(falaj: CommandLine) -> None:
    falaj.done("blobs", "list")
    (falaj.home / "id").unlink()

    ran = falaj("doctor")

    assert ran.status == 1
    assert "id is missing" in ran.out


def test_a_folder_with_settings_and_other_things_becomes_a_home(tmp_path: Path) -> None:
    (tmp_path / "home" / "logs").mkdir(parents=True)
    (tmp_path / "home" / "falaj.toml").touch(mode=0o600)

    assert open_home(tmp_path / "home", tmp_path / "config").ident.startswith("home_")


@pytest.mark.parametrize("text", ["", "../../etc/passwd", "home_\n\nx"])
def test_an_id_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "id").write_text(text)

    with pytest.raises(Damaged):
        open_home(tmp_path / "home", tmp_path / "config")
