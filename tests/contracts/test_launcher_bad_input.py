"""The Launcher contract, part four: misbehaving code ends with a clear reason, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
from pathlib import Path

import pytest

from launcher_testbed import ATTEMPT, STRONGEST_SANDBOX, LauncherTestbed, processes_mentioning
from polling import eventually

MIB = 1 << 20
GANG = """
import os, signal, sys, time
rank = os.environ["FALAJ_RANK"]
if rank != "1":
    time.sleep(600)
"""


@STRONGEST_SANDBOX
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("raise ValueError('bad column')", "exit code 1: ValueError: bad column"),
        ("sys.exit('no rows for carrier AA')", "exit code 1: no rows for carrier AA"),
        ("import no_such_module", "exit code 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("sys.exit(137)", "exit code 137 (a process that it ran was killed by SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV in string_at (script.py:6)"),
        ("os.kill(os.getpid(), signal.SIGBUS)", "killed by SIGBUS at script.py:6"),
        (
            "raise ExceptionGroup('two things', [ValueError('a'), KeyError('b')])",
            "exit code 1: ExceptionGroup: two things (2 sub-exceptions)",
        ),
    ],
)
def test_one_rank_that_fails_is_named_with_its_cause(
    testbed: LauncherTestbed, words: str, reason: str
) -> None:
    state = testbed.run(GANG + words, processes=3)

    assert state.reason == "Rank 1: " + reason, testbed.log()
    testbed.assert_nothing_is_left()


@pytest.mark.slow
def test_script_that_removes_its_own_directory_continues(testbed: LauncherTestbed) -> None:
    script = """
import os, shutil, time
shutil.rmtree(os.path.dirname(os.getcwd()), ignore_errors=True)
time.sleep(2.5)  # the disk is looked at every second
"""

    state = testbed.run(script, hang_s=60, disk_bytes=MIB)

    assert state.exit_code == 0, state


VICTIMS = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    {deed}
dist.all_reduce(torch.zeros(1))
time.sleep(600)
"""


@pytest.mark.slow
@STRONGEST_SANDBOX
@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "Rank 1: killed by SIGKILL"),
        ("raise ValueError('bad column')", "Rank 1: exit code 1: ValueError: bad column"),
    ],
)
def test_ranks_that_torchrun_terminated_are_not_blamed(
    testbed: LauncherTestbed, deed: str, reason: str
) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    launch = testbed.launch(VICTIMS.format(deed=deed), framework="torch", processes=2, grace_s=5)

    testbed.launcher().start(launch)

    eventually(lambda: testbed.launcher().state(ATTEMPT).phase == "ended")
    assert testbed.launcher().state(ATTEMPT).reason == reason, testbed.log().decode()
    testbed.assert_nothing_is_left()


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]])
    os._exit(0)
os.wait()
time.sleep(0.2)
print('left', flush=True)
"""


def test_daemon_ends_with_the_script_that_left_it(testbed: LauncherTestbed) -> None:
    word = f"daemon-{os.getpid()}-{testbed.root.name}"

    state = testbed.run(DAEMON, word)

    assert state.exit_code == 0, testbed.log()
    assert not processes_mentioning(word)
    testbed.assert_nothing_is_left()


STUBBORN = """
import os, signal, sys, time
os.setpgid(0, 0) if os.getpgrp() != os.getpid() else None
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        break
print('up', flush=True)
time.sleep(600)
"""


def test_process_that_ignores_signals_in_its_own_session_is_killed(testbed: LauncherTestbed) -> None:
    testbed.launcher().start(testbed.launch(STUBBORN))
    eventually(lambda: testbed.log().count(b"up") == 4)

    testbed.launcher().stop(ATTEMPT, grace_s=0.2)

    assert testbed.end().signal == signal.SIGKILL
    testbed.assert_nothing_is_left()


@pytest.mark.slow
@STRONGEST_SANDBOX
def test_a_gigabyte_of_output_costs_neither_memory_nor_much_time(testbed: LauncherTestbed) -> None:
    script = """
import os
line = b'x' * 65535 + b'\\n'
for _ in range(16 * 1024):
    os.write(1, line)
raise ValueError('after a gigabyte')
"""
    launch = testbed.launch(script)
    testbed.launcher(log_limit_bytes=MIB).start(launch)
    (supervisor,) = testbed.supervisors()

    held = []
    while testbed.launcher().state(ATTEMPT).phase != "ended":
        held.append(resident(supervisor))

    assert testbed.launcher().state(ATTEMPT).reason == "Exit code 1: ValueError: after a gigabyte"
    assert max(held) - min(size for size in held if size) < 16 * MIB
    assert (testbed.control / "job_1%2F1" / "log").stat().st_size < 2 * MIB
    testbed.assert_nothing_is_left()


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


@STRONGEST_SANDBOX
def test_endless_binary_line_is_kept_in_the_log_but_not_in_the_reason(testbed: LauncherTestbed) -> None:
    script = """
import os
for _ in range(200):
    os.write(1, bytes(range(256)).replace(b'\\n', b'') * 64)
os._exit(3)
"""

    state = testbed.run(script)

    assert state.reason is not None
    assert state.reason.startswith("Exit code 3")
    assert state.reason.isprintable()
    assert len(state.reason) <= 300
    log = testbed.launcher().log(ATTEMPT, offset=0, limit=4 * MIB)
    assert log == bytes(range(256)).replace(b"\n", b"") * 64 * 200


@STRONGEST_SANDBOX
def test_very_long_exception_is_truncated(testbed: LauncherTestbed) -> None:
    state = testbed.run("raise ValueError('x' * 1_000_000)")

    assert state.reason is not None
    assert state.reason.startswith("Exit code 1")
    assert len(state.reason) <= 300


def test_closed_output_does_not_end_the_attempt(testbed: LauncherTestbed) -> None:
    script = """
import os, time
for number in range(3):
    os.close(number)
time.sleep(0.3)
open('../outputs/done', 'w').close()
"""

    state = testbed.run(script)

    assert state.exit_code == 0
    assert (testbed.root / "attempts" / "job_1-1" / "outputs" / "done").exists()
    testbed.assert_nothing_is_left()


def test_device_files_of_the_output_can_be_written(testbed: LauncherTestbed) -> None:
    state = testbed.run("""
import subprocess
open('/dev/stderr', 'w').write('one\\n')
subprocess.run(['sh', '-c', 'echo two > /dev/stdout; echo three > /proc/self/fd/2'], check=True)
""")

    assert state.exit_code == 0, testbed.log()
    assert testbed.log() == b"one\ntwo\nthree\n"


@pytest.mark.parametrize(
    "testbed", ["bubblewrap", "uid"], indirect=True
)  # or it would reach the tests themselves
def test_script_that_kills_all_it_can_reach_ends(testbed: LauncherTestbed) -> None:
    state = testbed.run("import os, signal, time; os.kill(-1, signal.SIGKILL); time.sleep(600)")

    assert state.phase == "ended"
    assert state.exit_code != 0
    testbed.assert_nothing_is_left()


def test_script_that_kills_its_parent_ends(testbed: LauncherTestbed) -> None:
    state = testbed.run("import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(1)")

    # As another uid, it is PID 1 of its own PID namespace, which its children cannot kill.
    expected = (0, None) if testbed.sandbox.mechanism == "uid" else (None, signal.SIGKILL)
    assert (state.exit_code, state.signal) == expected
    testbed.assert_nothing_is_left()
