"""Parts of the launcher that need no process: ranks, termination, the log limit, and the spec as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from falaj.drivers.processes.attempt_folder import AttemptFolder, create_marker
from falaj.drivers.processes.attempt_spec import AttemptSpec, SandboxSpec
from falaj.drivers.processes.launcher import ProcessLauncher
from falaj.drivers.processes.sandbox_init.init import Gang
from falaj.drivers.processes.supervisor.attempt_log import AttemptLog
from falaj.drivers.processes.supervisor.init_plan import plan_ranks, shared_environment
from falaj.drivers.processes.supervisor.termination import TEARDOWN_DELAY_S, Termination
from falaj.drivers.sandbox.bubblewrap import view
from falaj.ports.launcher import Launch
from falaj.ports.machine.boot import boot_identity
from falaj.ports.sandbox import MachineFacts, UserCode

LAUNCH = Launch("job_1/1", Path("/jobs/1"), ["python", "script.py", "--rows", "3"])


@pytest.mark.parametrize(
    ("command", "start", "end"),
    [
        (["py", "s.py", "-m", "x"], ["py"], ["s.py", "-m", "x"]),
        (["py", "-u", "-X", "dev", "s.py"], ["py", "-u", "-X", "dev"], ["s.py"]),
        (["py", "-P", "-m", "pkg.train", "--lr", "1"], ["py", "-P"], ["--module", "pkg.train", "--lr", "1"]),
    ],
)
def test_torchrun_keeps_pythons_options_and_the_scripts(
    command: list[str], start: list[str], end: list[str]
) -> None:
    wrapped = plan_ranks(replace(LAUNCH, command=command, framework="torch", processes=4))[0]["command"]

    assert wrapped[: len(start) + 2] == [*start, "-m", "torch.distributed.run"]
    assert wrapped[-len(end) :] == end
    assert "--nproc-per-node=4" in wrapped


def test_only_plain_copies_get_a_rank_variable() -> None:
    assert [each["environment"] for each in plan_ranks(LAUNCH)] == [{}]
    copies = [each["environment"] for each in plan_ranks(replace(LAUNCH, processes=2))]
    shared = {"FALAJ_WORLD_SIZE": "2", "FALAJ_NODE_RANK": "0", "FALAJ_MASTER_ADDR": "127.0.0.1"}
    assert [each | {"FALAJ_MASTER_PORT": ""} for each in copies] == [
        {**shared, "FALAJ_MASTER_PORT": "", "FALAJ_RANK": rank, "FALAJ_LOCAL_RANK": rank} for rank in "01"
    ]
    assert len({each["FALAJ_MASTER_PORT"] for each in copies}) == 1
    assert len(plan_ranks(replace(LAUNCH, processes=2, framework="torch"))) == 1


def test_cpus_are_shared_among_the_processes_unless_the_user_sets_them() -> None:
    assert shared_environment(replace(LAUNCH, cpus=8, processes=2))["OMP_NUM_THREADS"] == "4"
    assert shared_environment(replace(LAUNCH, cpus=1, processes=2))["OMP_NUM_THREADS"] == "1"
    given = {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert shared_environment(replace(LAUNCH, environment=given))["OMP_NUM_THREADS"] == "3"
    assert (
        shared_environment(replace(LAUNCH, environment=given, gpus=("GPU-2",)))["CUDA_VISIBLE_DEVICES"]
        == "GPU-2"
    )


def test_an_elastic_gang_starts_the_remaining_processes(tmp_path: Path) -> None:
    waits, missing = [sys.executable, "-c", "input()"], ["/nonexistent"]
    ranks = [
        {"command": command, "environment": {}, "name": f"agent {number}"}
        for number, command in enumerate([waits, missing, waits, waits])
    ]
    plan = {"ranks": ranks, "folder": str(tmp_path), "limits": {}, "tolerated_losses": 2, "grace_s": 1}
    gang = Gang(plan, SimpleNamespace(enter=lambda _: None))  # type: ignore[arg-type]

    gang.start()

    assert sorted(gang._ranks.values()) == [0, 2, 3]
    assert gang.ended is None
    gang.kill()
    for process in gang._started:
        process.wait()


@pytest.mark.parametrize(
    ("run", "node_restarted"), [(boot_identity(), False), ("another boot", True), ("", False)]
)
def test_attempt_of_an_earlier_boot_is_lost(tmp_path: Path, run: str, node_restarted: bool) -> None:
    folder = AttemptFolder(tmp_path / "job_1%2F1")
    folder.path.mkdir()
    create_marker(folder.started, run)

    state = ProcessLauncher(tmp_path, sandbox=lambda: pytest.fail("nothing starts")).state("job_1/1")

    assert (state.phase, state.node_restarted) == ("lost", node_restarted)


def test_stopping_sends_sigterm_then_kills_then_tears_down() -> None:
    stopping = Termination(timeout_at=None, grace_s=10)
    assert stopping.due(99) is None

    stopping.request("stopped", grace_s=5, now=100)

    assert [stopping.due(now) for now in (100, 104.9, 105, 105 + TEARDOWN_DELAY_S)] == [
        "term",
        "term",
        "kill",
        "tear down",
    ]


def test_later_stop_request_can_only_shorten_the_grace() -> None:
    stopping = Termination(timeout_at=50, grace_s=10)

    assert stopping.due(49) is None
    assert stopping.due(50) == "term"
    stopping.request("stopped", grace_s=100, now=51)
    assert stopping.kill_at == 60
    stopping.request("stopped", grace_s=0, now=52)

    assert (stopping.due(52), stopping.cause) == ("kill", "timeout")


def test_log_beyond_the_limit_keeps_start_and_end(tmp_path: Path) -> None:
    output = AttemptLog(tmp_path / "log", limit_bytes=10)

    for chunk in (b"0123", b"456789ab", b"c" * 300_000, b"the end\n"):
        output.add(chunk)
    output.close()

    log = (tmp_path / "log").read_bytes()
    assert log.startswith(b"0123456789\n[falaj: the log is full at 10 bytes")
    assert log.count(b"[falaj: ") == 2
    assert log.endswith(b"the end\n")
    assert len(log) < 70_000


def test_log_just_over_the_limit_loses_nothing(tmp_path: Path) -> None:
    output = AttemptLog(tmp_path / "log", limit_bytes=4)

    output.add(b"012345")
    output.close()

    assert (tmp_path / "log").read_bytes().endswith(b"[falaj: 0 bytes were dropped here]\n45")


def test_attempt_spec_round_trips_through_json() -> None:
    facts = MachineFacts(
        is_root=True, python="/usr/bin/python3", spare_uids=range(7, 9), unshare="/bin/unshare"
    )
    launch = replace(
        LAUNCH, readable=[Path("/data")], hidden=[Path("/home")], gpus=("GPU-1",), environment={"A": "b"}
    )
    spec = AttemptSpec(launch, SandboxSpec("uid", facts), 5)

    assert AttemptSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_devices_are_shown_over_the_sandboxs_own_dev() -> None:
    code = UserCode(command=["true"], directory=Path("/jobs/1"), devices=[Path("/dev/full")])

    words = " ".join(view(code))

    assert words.index("--dev /dev ") < words.index("--dev-bind /dev/full /dev/full")
