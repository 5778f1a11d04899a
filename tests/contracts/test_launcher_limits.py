"""The Launcher contract, part three: resource limits, and the detection of hangs."""

from __future__ import annotations

import importlib.util
import os
import signal
from dataclasses import replace

import pytest

from falaj.drivers.processes.limits.disk_usage import free_bytes
from falaj.ports.launcher import AttemptState
from launcher_testbed import ATTEMPT, STRONGEST_SANDBOX, LauncherTestbed
from polling import eventually

MIB = 1 << 20

FILL = """
import os, sys, time
os.makedirs('../outputs/checkpoints', exist_ok=True)
for number in range(int(sys.argv[1])):
    with open(f'../outputs/checkpoints/{number}', 'wb') as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
print('up', flush=True)
time.sleep(600)
"""


# --------------------------------------------------------------------------------------------------- disk


def test_full_disk_quota_ends_the_attempt_and_names_the_largest_folder(testbed: LauncherTestbed) -> None:
    state = testbed.run(FILL, "24", disk_bytes=8 * MIB)

    assert state.exit_code is None
    assert state.reason is not None
    assert state.reason.startswith("It filled its disk quota: ")
    assert " of 8 MiB, most of it in outputs/checkpoints" in state.reason


@STRONGEST_SANDBOX
def test_one_file_cannot_outgrow_the_quota(testbed: LauncherTestbed) -> None:
    state = testbed.run("open('big', 'wb').write(bytes(64 << 20))", disk_bytes=8 * MIB)

    assert (testbed.root / "attempts" / "job_1-1" / "code" / "big").stat().st_size <= 8 * MIB
    assert state.reason is not None
    assert state.reason.startswith("Exit code 1 (its disk quota: no file may have more than 8 MiB): OSError")


@pytest.mark.slow
@STRONGEST_SANDBOX
@pytest.mark.parametrize("given", ["inputs/rows", "code/weights"])
def test_attempt_within_its_quota_succeeds_and_inputs_do_not_count(
    testbed: LauncherTestbed, given: str
) -> None:
    script = "import time; open('../outputs/x', 'wb').write(bytes(1 << 20)); time.sleep(2)"
    launch = testbed.launch(script, disk_bytes=4 * MIB)
    (launch.directory / given).write_bytes(os.urandom(16 * MIB))

    testbed.launcher().start(launch)

    assert testbed.end().exit_code == 0


@STRONGEST_SANDBOX
def test_files_that_are_removed_and_still_open_count_too(testbed: LauncherTestbed) -> None:
    script = """
import os, time
held = [open(f'f{number}', 'wb') for number in range(4)]
for number, file in enumerate(held):
    os.unlink(f'f{number}')
    file.write(os.urandom(4 << 20))
    file.flush()
time.sleep(600)
"""

    state = testbed.run(script, disk_bytes=8 * MIB)

    assert state.reason is not None
    assert state.reason.endswith("of 8 MiB, most of it in files that were removed and are still open")


@pytest.mark.slow
@STRONGEST_SANDBOX
def test_too_many_empty_files_end_the_attempt(testbed: LauncherTestbed) -> None:
    script = """
import time
for number in range(11_000):
    open(f'f{number}', 'w').close()
time.sleep(600)
"""

    state = testbed.run(script, disk_bytes=MIB)

    assert state.reason is not None
    assert state.reason.startswith("It made too many files: ")


@STRONGEST_SANDBOX
def test_private_scratch_space_is_bounded_too(testbed: LauncherTestbed) -> None:
    script = """
import os
print([os.statvfs(path).f_blocks * os.statvfs(path).f_frsize >> 20 for path in ('/tmp', '/dev/shm')])
"""

    testbed.run(script, disk_bytes=8 * MIB, memory_bytes=512 * MIB, processes=1)

    assert testbed.log() == b"[8, 512]\n"


@STRONGEST_SANDBOX
def test_memory_is_for_all_processes_together(testbed: LauncherTestbed) -> None:
    script = """
import os, resource
shm = os.statvfs('/dev/shm')
print(f"{resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20} {shm.f_blocks * shm.f_frsize >> 20}\\n", end="")
"""

    testbed.run(script, memory_bytes=1024 * MIB, processes=4)

    assert testbed.log() == b"256 1024\n" * 4


SHARED_MAPPING = """
import mmap, time
held = mmap.mmap(-1, 200 << 20)
for _ in range(200):
    held.write(b"x" * (1 << 20))
time.sleep(30)
"""
MEMFD = """
import ctypes, os, time
held = ctypes.CDLL(None).memfd_create(b"held", 0)
for _ in range(200):
    os.write(held, bytes(1 << 20))
time.sleep(30)
"""
SHARED_MEMORY_FILE = """
import os, time
with open(f"/dev/shm/held-{os.getpid()}", "w+b") as held:
    os.unlink(held.name)
    for _ in range(200):
        held.write(bytes(1 << 20))
    held.flush()
    time.sleep(30)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [SHARED_MAPPING, MEMFD, SHARED_MEMORY_FILE], ids=["mapping", "memfd", "file"]
)
def test_shared_memory_that_no_process_limit_refuses_is_counted(
    testbed: LauncherTestbed, script: str
) -> None:
    state = testbed.run(script, memory_bytes=150 * MIB)

    # A sandbox of its own may also refuse what does not fit into its /dev/shm.
    assert (state.reason or "").startswith(
        "It used more memory than it may: "
    ) or b"No space left" in testbed.log()
    assert any("shared mappings and memfd are not refused" in limit for limit in state.limits)


@pytest.mark.slow
@STRONGEST_SANDBOX
def test_mapped_files_do_not_count_as_memory(testbed: LauncherTestbed) -> None:
    script = """
import mmap, time
with open("rows", "wb") as file:
    for _ in range(200):
        file.write(bytes(1 << 20))
with open("rows", "rb") as file:
    rows = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert sum(rows[at] for at in range(0, len(rows), 4096)) == 0
    time.sleep(3)
"""

    state = testbed.run(script, memory_bytes=150 * MIB)

    assert (state.exit_code, state.reason) == (0, None)


@pytest.mark.slow
@STRONGEST_SANDBOX
def test_full_volume_stops_the_attempt_that_uses_most(testbed: LauncherTestbed) -> None:
    reserve = {"reserve_bytes": free_bytes(testbed.root) + (1 << 40)}  # the volume is always short
    for name, size in (("large/1", "120"), ("small/1", "80")):
        testbed.launcher(**reserve).start(testbed.launch(FILL, size, attempt=name))
        testbed.wait_for(b"up", name)

    state = testbed.end("large/1")
    assert state.reason is not None
    assert state.reason.startswith("The disk ran full (")
    assert "120 MiB, most of it in outputs/checkpoints" in state.reason
    state = testbed.end("small/1")  # now it is the largest
    assert state.reason is not None
    assert "80 MiB" in state.reason


@pytest.mark.slow
@STRONGEST_SANDBOX
def test_platform_inputs_do_not_count_when_choosing_the_attempt_to_stop(
    testbed: LauncherTestbed,
) -> None:
    reserve = {"reserve_bytes": free_bytes(testbed.root) + (1 << 40)}  # the volume is always short
    innocent = testbed.launch(FILL, "1", attempt="innocent/1")
    (innocent.directory / "inputs" / "rows").write_bytes(os.urandom(160 * MIB))
    testbed.launcher(**reserve).start(innocent)
    testbed.wait_for(b"up", "innocent/1")
    testbed.launcher(**reserve).start(testbed.launch(FILL, "80", attempt="greedy/1"))

    state = testbed.end("greedy/1")

    assert "held most of all attempts here: 80" in (state.reason or "")
    assert testbed.launcher().state("innocent/1").phase == "running"


# ---------------------------------------------------------------------------------------------- processes


FORK_BOMB = """
import os, time
print('up', flush=True)
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""


def test_fork_bomb_is_bounded_and_ended(testbed: LauncherTestbed) -> None:
    launch = testbed.launch(FORK_BOMB)

    testbed.launcher(max_tasks=150).start(launch)

    state = testbed.end()
    assert state.exit_code is None
    assert state.reason is not None
    assert state.reason.startswith("It started too many processes: ")
    testbed.assert_nothing_is_left()


@STRONGEST_SANDBOX
def test_state_reports_how_limits_are_enforced(testbed: LauncherTestbed) -> None:
    state = testbed.run("pass", disk_bytes=MIB, memory_bytes=512 * MIB)

    assert {word.partition(":")[0] for word in state.limits} >= {"memory", "pids", "disk"}


@pytest.mark.slow
@pytest.mark.parametrize("testbed", ["same-uid"], indirect=True)
def test_ranks_start_in_cgroups_of_their_own_and_oom_kills_are_reported_by_rank(
    testbed: LauncherTestbed,
) -> None:
    """On plain files instead of cgroups; tests/unit/drivers/processes/test_cgroup.py has the real ones."""
    parent = testbed.root / "cgroup"
    parent.mkdir()
    for name, text in (("controllers", "memory pids"), ("subtree_control", "memory pids"), ("procs", "")):
        (parent / f"cgroup.{name}").write_text(text)
    script = """
import os, signal, sys, time
from pathlib import Path
(group,) = Path(sys.argv[1]).glob('falaj-*')
rank = os.environ['FALAJ_RANK']
while (group / 'init' / 'cgroup.procs').read_text() != str(os.getppid()):
    time.sleep(0.01)  # the init process returns to its cgroup after it has started all ranks
assert (group / f'rank-{rank}' / 'cgroup.procs').read_text() == str(os.getppid())
if rank == '0':
    time.sleep(600)
(group / 'rank-1' / 'memory.events').write_text('oom 1\\noom_kill 1\\n')
os.kill(os.getpid(), signal.SIGKILL)
"""
    launch = testbed.launch(script, str(parent), processes=2, memory_bytes=1 << 30)

    testbed.launcher(cgroup=parent).start(launch)

    state = testbed.end()
    assert state.limits == ("memory: 1 GiB by cgroup", "pids: cgroup")
    assert state.reason == (
        "Rank 1: killed by SIGKILL; it ran out of memory: all processes together may have 1 GiB"
    ), testbed.log()


def test_resource_usage_is_measured(testbed: LauncherTestbed) -> None:
    script = """
import time
held = bytearray(50 << 20)
while time.process_time() < 0.3:
    pass
"""

    state = testbed.run(script)

    assert state.used.cpu_s is not None
    assert 0.3 <= state.used.cpu_s < 10
    assert (state.used.peak_memory_bytes or 0) > 50 * MIB


# -------------------------------------------------------------------------------------------------- hangs


def test_silence_ends_the_attempt_with_the_stack_in_the_log(testbed: LauncherTestbed) -> None:
    script = """
import time
def wait_for_godot():
    time.sleep(600)
print('up', flush=True)
wait_for_godot()
"""

    state = testbed.run(script, hang_s=1, grace_s=5)

    assert state.reason == ("It hung: no sign of life for 1 s; it stood in wait_for_godot (script.py:4)"), (
        testbed.log()
    )
    assert (state.exit_code, state.signal) == (None, signal.SIGTERM)
    assert b'line 4 in wait_for_godot\n  File "' in testbed.log()
    assert sorted(path.name for path in (testbed.root / "attempts" / "job_1-1").iterdir()) == [
        "code",
        "inputs",
        "outputs",
    ]


@pytest.mark.slow
@STRONGEST_SANDBOX
def test_rank_without_heartbeat_is_named_while_others_print_and_beat(testbed: LauncherTestbed) -> None:
    script = """
import os, time
rank, folder = os.environ['FALAJ_RANK'], os.environ['FALAJ_HEARTBEAT']
open(f'{folder}/{rank}', 'w').close()
while rank != '1':
    os.utime(f'{folder}/{rank}')
    print('step', flush=True)
    time.sleep(0.1)
time.sleep(600)
"""

    state = testbed.run(script, processes=3, hang_s=1.5, grace_s=5)

    assert state.reason == "Rank 1 hung: no sign of life for 1.5 s; it stood at script.py:9"
    for rank in range(3):
        assert f"[falaj: rank {rank}, process ".encode() in testbed.log()


@pytest.mark.slow
def test_ended_rank_is_not_reported_as_hung(testbed: LauncherTestbed) -> None:
    script = """
import os, time
rank, folder = os.environ['FALAJ_RANK'], os.environ['FALAJ_HEARTBEAT']
open(f'{folder}/{rank}', 'w').close()
if rank == '1':
    os._exit(0)  # and its promise stays
for _ in range(30):
    os.utime(f'{folder}/{rank}')
    time.sleep(0.1)
"""

    state = testbed.run(script, processes=2, hang_s=1.5, grace_s=5)

    assert state.exit_code == 0, state


@STRONGEST_SANDBOX
def test_hung_script_that_exits_cleanly_on_sigterm_has_failed(testbed: LauncherTestbed) -> None:
    script = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(600)
"""

    state = testbed.run(script, hang_s=1)

    assert state.exit_code is None
    assert state.reason is not None
    assert state.reason.startswith("It hung: ")


@pytest.mark.slow
@STRONGEST_SANDBOX
@pytest.mark.parametrize(
    "life", ["print('.', flush=True)", "open(os.environ['FALAJ_HEARTBEAT'] + '/any', 'w').close()"]
)
def test_attempt_with_heartbeats_is_not_stopped(testbed: LauncherTestbed, life: str) -> None:
    script = f"import os, time\nfor _ in range(20):\n    {life}\n    time.sleep(0.15)"

    state = testbed.run(script, hang_s=1.5)

    assert state.exit_code == 0, state


@STRONGEST_SANDBOX
def test_hang_of_a_program_without_python_shows_the_kernel_stack(testbed: LauncherTestbed) -> None:
    state = testbed.run("", command=["sleep", "600"], hang_s=1)

    assert state.reason == "It hung: no sign of life for 1 s"
    assert b": sleep 600]\n  wchan: " in testbed.log()


@STRONGEST_SANDBOX
def test_sitecustomize_and_path_of_the_user_are_kept(testbed: LauncherTestbed) -> None:
    launch = testbed.launch(
        "import os, sys; print(sys.hello, [path for path in sys.path if 'heartbeat' in path])",
        environment={"PYTHONPATH": "."},
        hang_s=60,
    )
    (launch.directory / "code" / "sitecustomize.py").write_text("import sys; sys.hello = 'hello'")

    testbed.launcher().start(launch)

    assert testbed.end().exit_code == 0
    assert testbed.log() == b"hello []\n"


HUNG_COLLECTIVE = """
import os, threading, time
ready = threading.Event()
def show_life():  # it takes a while to load torch
    while not ready.wait(0.2):
        open(os.environ["FALAJ_HEARTBEAT"] + f"/any", "w").close()
threading.Thread(target=show_life).start()
import torch, torch.distributed as dist
rank = int(os.environ["FALAJ_RANK"])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
dist.barrier()
ready.set()
if rank == 1:
    time.sleep(600)
dist.all_reduce(torch.zeros(1))
"""


@pytest.mark.slow
@STRONGEST_SANDBOX
def test_rank_that_the_others_wait_for_is_the_one_that_hung(testbed: LauncherTestbed) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")

    launch = testbed.launch(HUNG_COLLECTIVE, processes=2, hang_s=3, grace_s=5)
    launch = replace(launch, environment={"GLOO_SOCKET_IFNAME": "lo"})
    testbed.launcher().start(launch)

    state = ended(testbed)
    assert state.reason == "Rank 1 hung: no sign of life for 3 s; it stood at script.py:14", (
        testbed.log().decode()
    )
    assert b"in all_reduce\n" in testbed.log()


def ended(testbed: LauncherTestbed) -> AttemptState:
    return eventually(
        lambda: (state := testbed.launcher().state(ATTEMPT)).phase == "ended" and state
    ) or AttemptState("lost")
