"""How the limits of an attempt are enforced on machines without cgroups."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from falaj.drivers.processes.attempt_folder import AttemptFolder
from falaj.drivers.processes.attempt_spec import AttemptSpec, SandboxSpec
from falaj.drivers.processes.limits import enforcement
from falaj.ports.launcher import Launch
from falaj.ports.sandbox import MachineFacts, Mechanism


@pytest.fixture(autouse=True)
def no_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enforcement, "find_parent", lambda _: None)


def applied(folder: Path, mechanism: Mechanism, facts: MachineFacts) -> enforcement.AppliedLimits:
    launch = Launch(attempt="job/1", directory=folder, command=("true",), environment={})
    spec = AttemptSpec(launch, SandboxSpec(mechanism, facts), log_limit_bytes=1)
    return enforcement.apply_limits(AttemptFolder(folder), spec, ranks=1, max_tasks=150)


def test_job_with_its_own_uid_has_its_own_task_limit(tmp_path: Path) -> None:
    facts = MachineFacts(is_root=True, python=sys.executable, spare_uids=range(70_000, 80_000))

    assert applied(tmp_path, "bubblewrap", facts).processes["RLIMIT_NPROC"] == 150


@pytest.mark.parametrize("mechanism", ["bubblewrap", "landlock", "same-uid"])
def test_fork_bomb_of_an_ordinary_user_cannot_fill_the_machine(tmp_path: Path, mechanism: Mechanism) -> None:
    """Counting five times a second is slower than a fork bomb, which once took 23 GiB of memory before it was seen."""
    limits = applied(tmp_path, mechanism, MachineFacts(is_root=False, python=sys.executable))

    assert 2 * 150 < limits.processes["RLIMIT_NPROC"] < 32_768
    assert "pids: counted, and the platform's user has a limit (RLIMIT_NPROC)" in limits.descriptions
