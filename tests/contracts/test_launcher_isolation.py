"""The Launcher contract, part two: gangs, logs, the environment, and the isolation of user code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from falaj.drivers.processes.attempt_spec import SandboxSpec
from falaj.drivers.processes.launcher import ProcessLauncher
from falaj.errors import IsolationRefused
from falaj.records.no_telemetry import NO_TELEMETRY
from launcher_testbed import ATTEMPT, STRONGEST_SANDBOX, LauncherTestbed
from polling import eventually

ISOLATED = pytest.mark.parametrize("testbed", ["bubblewrap", "landlock", "uid"], indirect=True)


# -------------------------------------------------------------------------------------------------- gangs


@STRONGEST_SANDBOX
def test_plain_copies_know_their_rank(testbed: LauncherTestbed) -> None:
    script = (
        "import os; print(os.environ['FALAJ_RANK'] + '/' + os.environ['FALAJ_WORLD_SIZE'] + '\\n', end='')"
    )

    state = testbed.run(script, processes=3)

    assert state.exit_code == 0
    assert sorted(testbed.log().split()) == [b"0/3", b"1/3", b"2/3"]


def test_one_failed_copy_stops_the_others(testbed: LauncherTestbed) -> None:
    script = """
import os, time
if os.environ["FALAJ_RANK"] == "1":
    raise ValueError("bad column")
time.sleep(600)
"""

    state = testbed.run(script, processes=3)

    assert state.reason == "Rank 1: exit code 1: ValueError: bad column"


ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(rank)
open(f"../outputs/{dist.get_rank()}", "w").write(str(rank.item()))
fails = dist.get_rank() == 1 and __import__("sys").argv[1:] == ["fail"]
dist.barrier()
dist.destroy_process_group()  # torch may abort where a process ends without, and that is no exit code
if fails:
    raise ValueError("bad column")
"""


@pytest.mark.slow
@pytest.mark.parametrize("testbed", ["bubblewrap", "landlock-shared", "same-uid"], indirect=True)
def test_torch_processes_reduce_together_without_a_network(testbed: LauncherTestbed) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")

    state = testbed.run(ALL_REDUCE, framework="torch", processes=2)

    assert state.exit_code == 0, testbed.log().decode()
    outputs = testbed.root / "attempts" / "job_1-1" / "outputs"
    assert {path.name: path.read_text() for path in outputs.iterdir()} == {"0": "3.0", "1": "3.0"}


@pytest.mark.slow
@STRONGEST_SANDBOX
def test_torch_reason_names_the_rank_that_failed(testbed: LauncherTestbed) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")

    state = testbed.run(ALL_REDUCE, "fail", framework="torch", processes=2)

    assert state.reason == "Rank 1: exit code 1: ValueError: bad column"


@STRONGEST_SANDBOX
def test_localhost_resolves_without_a_network(testbed: LauncherTestbed) -> None:
    script = """
import socket
for name in ("localhost", socket.gethostname()):
    with socket.create_server((name, 0)) as server, socket.create_connection((name, server.getsockname()[1])):
        print(socket.getnameinfo(server.getsockname(), 0)[0])
"""

    testbed.run(script)

    assert testbed.log() == b"localhost\nlocalhost\n"


# ---------------------------------------------------------------------------------------------------- log


@STRONGEST_SANDBOX
def test_log_is_capped_and_keeps_its_end(testbed: LauncherTestbed) -> None:
    script = """
import sys
for _ in range(300):
    sys.stdout.buffer.write(b"x" * 999_999 + b"\\n")
raise ValueError("after 300 MB")
"""

    state = testbed.run(script)

    size = testbed.log_file().stat().st_size
    assert 256 << 20 < size < (256 << 20) + (1 << 20)
    assert state.reason == "Exit code 1: ValueError: after 300 MB"
    end = testbed.launcher().log(ATTEMPT, offset=256 << 20, limit=1 << 20)
    assert b"the log is full at 268435456 bytes" in end
    assert end.endswith(b"ValueError: after 300 MB\n")


@STRONGEST_SANDBOX
def test_log_keeps_bytes_as_they_are(testbed: LauncherTestbed) -> None:
    every = bytes(range(256)) * 10

    state = testbed.run("import sys; sys.stdout.buffer.write(bytes(range(256)) * 10); sys.exit(3)")

    assert testbed.log() == every
    assert state.reason is not None
    assert state.reason.isprintable()


# -------------------------------------------------------------------------------------------------- isolation


def test_environment_has_the_given_and_the_launchers_variables_only(
    testbed: LauncherTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_TOKEN", "secret-8c1f")
    script = "import json, os, time; print(json.dumps(dict(os.environ)), flush=True); time.sleep(600)"
    launch = testbed.launch(
        script, environment={"LC_ALL": "C.UTF-8", "MINE": "1"}, cpus=4, gpus=("GPU-0", "GPU-2")
    )

    testbed.launcher().start(launch)

    found: dict[str, Any] = eventually(lambda: json.loads(testbed.log() or b"{}"))
    if testbed.sandbox.mechanism == "landlock":
        found.pop("TMPDIR")
    assert found == {
        **NO_TELEMETRY,
        "LC_ALL": "C.UTF-8",
        "MINE": "1",
        "OMP_NUM_THREADS": "4",
        "LOKY_MAX_CPU_COUNT": "4",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-2",
    }
    (supervisor,) = testbed.supervisors()
    assert b"secret-8c1f" not in Path(f"/proc/{supervisor}/environ").read_bytes()


@STRONGEST_SANDBOX
def test_no_gpu_is_visible_unless_assigned(testbed: LauncherTestbed) -> None:
    testbed.run("import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))", gpus=())

    assert testbed.log() == b"''\n"


@ISOLATED
def test_code_can_neither_read_nor_forge_its_own_state(testbed: LauncherTestbed) -> None:
    script = """
import os, sys
for act in (os.listdir, lambda path: open(path + "/ended.json", "w")):
    try:
        act(sys.argv[1])
        print("reached")
    except OSError as error:
        print(type(error).__name__)
"""

    testbed.run(script, str(testbed.control / "job_1%2F1"))

    assert b"reached" not in testbed.log()
    assert testbed.log().count(b"Error") == 2


@pytest.mark.parametrize("testbed", ["uid"], indirect=True)
def test_sandbox_that_cannot_be_built_ends_the_attempt_with_the_reason(testbed: LauncherTestbed) -> None:
    launch = testbed.launch("print(1)")
    (testbed.root / "attempts").chmod(0o700)

    testbed.launcher().start(launch)

    state = testbed.end()
    assert (state.phase, state.exit_code, state.signal) == ("ended", None, None)
    assert state.reason is not None
    assert state.reason.startswith("It could not be started: ")
    assert "closed to other users" in state.reason


@STRONGEST_SANDBOX
def test_refused_start_leaves_nothing_and_may_be_tried_again(testbed: LauncherTestbed) -> None:
    def refuse() -> SandboxSpec:
        raise IsolationRefused("not here")

    launch = testbed.launch("print(1)")
    with pytest.raises(IsolationRefused):
        ProcessLauncher(testbed.control, sandbox=refuse).start(launch)
    assert testbed.launcher().state(ATTEMPT).phase == "unknown"

    testbed.launcher().start(launch)

    assert testbed.end().exit_code == 0


def test_link_instead_of_the_heartbeat_folder_is_not_followed(testbed: LauncherTestbed) -> None:
    target = testbed.root / "somebody-elses"
    (target / "kept").mkdir(parents=True)
    target.chmod(0o755)
    script = """
import os, shutil, sys
shutil.rmtree('../.heartbeat', ignore_errors=True)
os.symlink(sys.argv[1], '../.heartbeat')
"""

    assert testbed.run(script, str(target), hang_s=60).exit_code == 0

    assert target.stat().st_mode & 0o777 == 0o755
    assert (target / "kept").is_dir()
