"""The Launcher contract: attempts run once, independently of the platform, and end on request."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

from falaj.drivers.processes.attempt_lease import AttemptLease
from falaj.errors import InvalidInput
from falaj.ports.machine.boot import boot_seconds
from launcher_testbed import ATTEMPT, STRONGEST_SANDBOX, LauncherTestbed, kill, processes_mentioning, release
from polling import eventually, let_pass

WAITING = "import time; print('up', flush=True); time.sleep(600)"
ONCE = "open('../outputs/ran', 'a').write('once\\n'); print('up', flush=True)"
UNTIL_TOLD = (
    ONCE
    + """
import os, time
while not os.path.exists('go'):
    time.sleep(0.01)
print('done', flush=True)
"""
)
# A child in its own session, which no signal to the script's process group reaches; its command line has a marker.
WITH_DAEMON = """
import subprocess, sys, time
sleep = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, '-c', sleep, sys.argv[1]], start_new_session=True)
subprocess.Popen([sys.executable, '-c', sleep, sys.argv[1]])
print('up', flush=True)
time.sleep(float(sys.argv[2]))
"""


def runs(testbed: LauncherTestbed, attempt: str = ATTEMPT) -> int:
    ran = testbed.root / "attempts" / attempt.replace("/", "-") / "outputs" / "ran"
    return len(ran.read_text().splitlines()) if ran.exists() else 0


# ------------------------------------------------------------------------------------- from start to end


def test_code_runs_in_its_folder_and_succeeds(testbed: LauncherTestbed) -> None:
    before = datetime.now(UTC)

    state = testbed.run("import os; print(os.getcwd()); open('../outputs/x', 'w').write('made')")

    assert (state.phase, state.exit_code, state.signal, state.reason) == ("ended", 0, None, None), state
    assert state.stopped is False
    assert state.started_at is not None
    assert state.ended_at is not None
    assert before <= state.started_at <= state.ended_at
    directory = testbed.root / "attempts" / "job_1-1"
    assert testbed.log().decode().strip() == str(testbed.code_folder())
    assert (directory / "outputs" / "x").read_text() == "made"
    assert sorted(path.name for path in directory.iterdir()) == ["code", "inputs", "outputs"]


def test_both_outputs_reach_the_log_and_the_exit_code_the_state(testbed: LauncherTestbed) -> None:
    state = testbed.run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")

    assert (state.phase, state.exit_code) == ("ended", 7)
    assert testbed.log() == b"out\nerr\n"
    assert testbed.launcher().log(ATTEMPT, offset=4, limit=2) == b"er"
    assert testbed.launcher().log(ATTEMPT, offset=99, limit=2) == b""


@STRONGEST_SANDBOX
def test_reason_is_the_exception_that_the_script_raised(testbed: LauncherTestbed) -> None:
    script = """
try:
    {}['carrier']
except KeyError as error:
    raise ValueError("bad column") from error
"""

    state = testbed.run(script)

    assert state.reason == "Exit code 1: ValueError: bad column"


def test_reason_names_the_signal(testbed: LauncherTestbed) -> None:
    state = testbed.run("import os; os.abort()")

    assert (state.exit_code, state.signal) == (None, signal.SIGABRT)
    assert state.reason == "Killed by SIGABRT at script.py:1"


@STRONGEST_SANDBOX
def test_command_that_does_not_exist_ends_with_its_name(testbed: LauncherTestbed) -> None:
    state = testbed.run("", command=["no-such-program"])

    assert state.exit_code == 127
    assert state.reason is not None
    assert "no-such-program" in state.reason


@STRONGEST_SANDBOX
def test_more_memory_than_allowed_is_an_error_of_the_script(testbed: LauncherTestbed) -> None:
    state = testbed.run("bytearray(512 << 20)", memory_bytes=256 << 20)

    assert state.reason == "Exit code 1 (out of memory: each process may have 256 MiB): MemoryError"


# --------------------------------------------------------------------------------------------- only once


def test_second_start_changes_nothing_while_it_runs_and_after(testbed: LauncherTestbed) -> None:
    launch = testbed.launch(UNTIL_TOLD)
    testbed.launcher().start(launch)
    testbed.wait_for(b"up")

    testbed.launcher().start(launch)
    testbed.tell("go")
    first = testbed.end()
    testbed.launcher().start(launch)

    assert testbed.launcher().state(ATTEMPT) == first
    assert runs(testbed) == 1


@pytest.mark.slow
def test_starters_that_race_run_it_once(testbed: LauncherTestbed) -> None:
    launch = testbed.launch(UNTIL_TOLD)
    with ExitStack() as stack:
        starters = [stack.enter_context(testbed.starter(launch)) for _ in range(3)]

        for each in starters:
            release(each)

        assert [each.stdout.readline() for each in starters if each.stdout] == ["started\n"] * 3
    testbed.wait_for(b"up")
    assert len(testbed.supervisors()) == 1
    testbed.tell("go")
    assert testbed.end().exit_code == 0
    assert runs(testbed) == 1


def test_attempt_continues_when_its_starter_is_killed(testbed: LauncherTestbed) -> None:
    launch = testbed.launch(UNTIL_TOLD)
    with testbed.starter(launch) as starter:
        release(starter)
        testbed.wait_for(b"up")
        starter.kill()
        starter.wait()

    assert testbed.launcher().state(ATTEMPT).phase == "running"
    testbed.tell("go")
    assert testbed.end().exit_code == 0
    assert testbed.log() == b"up\ndone\n"


@STRONGEST_SANDBOX
@pytest.mark.parametrize("milliseconds", [0, 15, 30, 50, 90])
def test_starter_killed_at_any_moment_leaves_an_attempt_that_runs_once(
    testbed: LauncherTestbed, milliseconds: int
) -> None:
    launch = testbed.launch(ONCE)
    with testbed.starter(launch) as starter:
        release(starter)
        let_pass(milliseconds / 1000)  # no waiting: the test is about the moment of the kill
        starter.kill()
        starter.wait()

    testbed.launcher().start(launch)

    assert testbed.end().exit_code == 0
    assert runs(testbed) == 1


def test_killed_supervisor_ends_the_code_and_the_attempt_is_lost(testbed: LauncherTestbed) -> None:
    word = f"daemon-{time.monotonic_ns()}"
    launch = testbed.launch(ONCE + WITH_DAEMON, word, "600")
    testbed.launcher().start(launch)
    testbed.wait_for(b"up\nup\n")
    (supervisor,) = testbed.supervisors()

    kill(supervisor)

    assert testbed.end().phase == "lost"
    eventually(lambda: not processes_mentioning(word))
    testbed.launcher().start(launch)
    assert testbed.launcher().state(ATTEMPT).phase == "lost"
    assert (testbed.log(), testbed.supervisors()) == (b"up\nup\n", [])


def test_killed_init_process_ends_the_code_too(testbed: LauncherTestbed) -> None:
    word = f"daemon-{time.monotonic_ns()}"
    testbed.launcher().start(testbed.launch(WITH_DAEMON, word, "600"))
    testbed.wait_for(b"up")
    here = os.fsencode(testbed.root)
    init = [pid for pid in processes_mentioning("The init process inside") if here in cmdline(pid)]

    kill(init[-1])

    state = testbed.end()
    assert (state.phase, state.exit_code, state.signal) == ("ended", None, signal.SIGKILL)
    assert not processes_mentioning(word)


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


# ---------------------------------------------------------------------------------------------- stopping


def test_stop_lets_the_script_finish_its_signal_handler(testbed: LauncherTestbed) -> None:
    script = """
import signal, sys, time
def goodbye(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, goodbye)
print("up", flush=True)
time.sleep(600)
"""
    testbed.launcher().start(testbed.launch(script))
    testbed.wait_for(b"up")

    testbed.launcher().stop(ATTEMPT, grace_s=30)

    state = testbed.end()
    assert (state.exit_code, state.stopped) == (0, True)
    assert testbed.log() == b"up\nsaved\n"


def test_stop_ends_a_script_without_a_signal_handler(testbed: LauncherTestbed) -> None:
    testbed.launcher().start(testbed.launch(WAITING))
    testbed.wait_for(b"up")

    testbed.launcher().stop(ATTEMPT, grace_s=30)

    state = testbed.end()
    assert (state.signal, state.reason) == (signal.SIGTERM, "It was stopped on request: killed by SIGTERM")


def test_script_that_ignores_the_stop_is_killed_after_the_grace(testbed: LauncherTestbed) -> None:
    handler = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
    testbed.launcher().start(testbed.launch(handler + WAITING))
    testbed.wait_for(b"up")

    testbed.launcher().stop(ATTEMPT, grace_s=0.3)

    assert testbed.end().signal == signal.SIGKILL
    assert b"asked" in testbed.log()  # before it was killed


def test_stop_right_after_start_is_honoured(testbed: LauncherTestbed) -> None:
    testbed.launcher().start(testbed.launch(WAITING))

    testbed.launcher().stop(ATTEMPT, grace_s=1)

    assert testbed.end().exit_code is None


def test_time_limit_stops_it(testbed: LauncherTestbed) -> None:
    state = testbed.run(WAITING, timeout_s=0.6, grace_s=5)

    assert (state.phase, state.signal) == ("ended", signal.SIGTERM)
    assert state.reason == "It was stopped after 0.6 s, its time limit"


@STRONGEST_SANDBOX
def test_script_that_exits_cleanly_at_its_time_limit_has_failed(
    testbed: LauncherTestbed,
) -> None:
    script = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + WAITING

    state = testbed.run(script, timeout_s=1, grace_s=5)

    assert (state.exit_code, state.reason) == (None, "It was stopped after 1 s, its time limit")


@pytest.mark.parametrize("seconds", ["0", "600"])
def test_children_end_with_the_script(testbed: LauncherTestbed, seconds: str) -> None:
    word = f"daemon-{time.monotonic_ns()}"
    testbed.launcher().start(testbed.launch(WITH_DAEMON, word, seconds))
    testbed.wait_for(b"up")

    testbed.launcher().stop(ATTEMPT, grace_s=5)

    testbed.end()
    assert not processes_mentioning(word)


# ------------------------------------------------------------------------------------- unknown, forgotten


@STRONGEST_SANDBOX
def test_unknown_attempt_is_not_an_error(testbed: LauncherTestbed) -> None:
    launcher = testbed.launcher()

    launcher.stop("job_9/1", grace_s=1)
    launcher.delete("job_9/1")

    assert launcher.state("job_9/1").phase == "unknown"
    assert launcher.log("job_9/1", offset=0, limit=10) == b""


@STRONGEST_SANDBOX
@pytest.mark.parametrize("name", ["", ".", "..", "x" * 300])
def test_name_that_is_not_a_valid_folder_name_is_refused(testbed: LauncherTestbed, name: str) -> None:
    with pytest.raises(InvalidInput):
        testbed.launcher().state(name)


@STRONGEST_SANDBOX
def test_attempt_stops_when_its_lease_has_run_out(testbed: LauncherTestbed) -> None:
    lease = AttemptLease(testbed.root / "lease", lasts_s=1.0)
    lease.renew(boot_seconds())

    testbed.launcher(lease=lease.path).start(testbed.launch("import time; time.sleep(600)"))

    state = testbed.end()
    assert (state.phase, state.fenced, state.stopped) == ("ended", True, False)
    assert (
        state.reason
        == "It was stopped because no controller renewed its lease: another machine may run it now"
    )
    testbed.assert_nothing_is_left()


@STRONGEST_SANDBOX
def test_attempt_goes_on_while_its_lease_is_renewed(testbed: LauncherTestbed) -> None:
    lease = AttemptLease(testbed.root / "lease", lasts_s=60.0)
    lease.renew(boot_seconds())
    testbed.launcher(lease=lease.path).start(testbed.launch("import time; time.sleep(1)"))

    state = testbed.end()

    assert (state.exit_code, state.fenced) == (0, False)


@STRONGEST_SANDBOX
@pytest.mark.parametrize("since", [None, -100.0])
def test_attempt_without_a_valid_lease_never_runs(testbed: LauncherTestbed, since: float | None) -> None:
    """A controller that was paused between its last renewal and the start must not start anything."""
    lease = AttemptLease(testbed.root / "lease", lasts_s=10.0)
    if since is not None:
        lease.renew(boot_seconds() + since)
    launch = testbed.launch("open('ran', 'w')")

    testbed.launcher(lease=lease.path).start(launch)

    assert testbed.end().fenced
    assert not (launch.directory / "code" / "ran").exists()


@STRONGEST_SANDBOX
def test_launch_without_code_is_refused(testbed: LauncherTestbed) -> None:
    launch = testbed.launch(ONCE)
    shutil.rmtree(launch.directory / "code")

    with pytest.raises(InvalidInput, match="code/"):
        testbed.launcher().start(launch)


def test_forgotten_attempt_is_killed_and_gone(testbed: LauncherTestbed) -> None:
    word = f"daemon-{time.monotonic_ns()}"
    kept = testbed.root / "kept"
    kept.mkdir()
    (kept / "file").touch()
    script = f"import os; os.symlink({str(kept)!r}, 'link'); os.mkdir('shut'); open('shut/x', 'w')\n"
    script += "os.chmod('shut', 0)\n" + WITH_DAEMON
    launch = testbed.launch(script, word, "600")
    testbed.launcher().start(launch)
    testbed.wait_for(b"up")

    testbed.launcher().delete(ATTEMPT)

    testbed.assert_ended(word)
    assert not launch.directory.exists()
    assert os.listdir(testbed.control) == []
    assert (kept / "file").exists()
    assert testbed.launcher().state(ATTEMPT).phase == "unknown"


VERY_DEEP_AND_CLOSED = """
import os
os.mkdir('../outputs/closed')
open('../outputs/closed/x', 'w').close()
os.chmod('../outputs/closed', 0)
os.symlink('/', '../outputs/all')
os.chdir('../outputs')
for _ in range(2000):
    os.mkdir('d')
    os.chdir('d')
os.mkfifo('pipe')
"""


def test_deeply_nested_folders_are_removed(testbed: LauncherTestbed) -> None:
    state = testbed.run(VERY_DEEP_AND_CLOSED)
    assert state.exit_code == 0, state

    testbed.launcher().delete(ATTEMPT)

    assert not (testbed.root / "attempts" / ATTEMPT.replace("/", "-")).exists()
    assert Path("/etc").is_dir()


def test_many_long_arguments_arrive(testbed: LauncherTestbed) -> None:
    words = [f"{number}".zfill(4000) for number in range(100)]

    state = testbed.run("import os, sys; print(len(sys.argv), sys.argv[-1][-2:], os.listdir('..'))", *words)

    assert state.exit_code == 0, state
    assert testbed.log().startswith(b"101 99 ")
    assert b".falaj" not in testbed.log()
