"""Attempts under a fake Nsight Systems, which records its arguments and runs the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from falaj.drivers.processes.frameworks.process import LOOPBACK
from falaj.drivers.processes.nsys import find_nsys, nsys_folders, under_nsys
from falaj.drivers.processes.supervisor.init_plan import plan_ranks
from falaj.errors import InvalidInput
from falaj.ports.launcher import Launch
from launcher_testbed import STRONGEST_SANDBOX, LauncherTestbed

# Beside its report it writes its arguments.
PRETENDED = """#!/bin/sh
output=
for word in "$@"; do
  case "$word" in
    --output=*) output="${word#--output=}" ;;
  esac
done
printf '%s\\n' "$@" > "$output.nsys-rep"
while [ "$1" = profile ] || [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
SCRIPT = """
import os, sys
os.write(1, f"{os.environ['FALAJ_NVTX']} {sys.argv[1]}\\n".encode())
sys.exit(int(sys.argv[2]))
"""
LAUNCH = Launch("job_1/1", Path("/jobs/1"), ["python", "train.py"], nsys=True)


@pytest.fixture
def installed(testbed: LauncherTestbed, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the fake nsys on the path by a symbolic link, as its packages do."""
    program = testbed.root / "nsight" / "bin" / "nsys"
    program.parent.mkdir(parents=True)
    program.write_text(PRETENDED)
    program.chmod(0o755)
    linked = testbed.root / "path" / "nsys"
    linked.parent.mkdir()
    linked.symlink_to(program)
    monkeypatch.setenv("PATH", str(linked.parent), prepend=":")
    return program


@pytest.mark.usefixtures("installed")
def test_ranks_run_under_nsys_and_leave_their_reports(testbed: LauncherTestbed) -> None:
    state = testbed.run(SCRIPT, "given", "0", nsys=True, processes=2)

    outputs = testbed.root / "attempts" / "job_1-1" / "outputs"
    assert state.exit_code == 0, testbed.log()
    assert testbed.log().splitlines() == [b"1 given", b"1 given"]
    assert sorted(path.name for path in outputs.iterdir()) == ["rank-0.nsys-rep", "rank-1.nsys-rep"]
    arguments = (outputs / "rank-1.nsys-rep").read_text().splitlines()
    assert arguments[0] == "profile"
    assert arguments[-4:] == [testbed.sandbox.facts.python, "script.py", "given", "0"]


@STRONGEST_SANDBOX
@pytest.mark.usefixtures("installed")
def test_failure_under_nsys_is_reported_as_the_jobs(testbed: LauncherTestbed) -> None:
    assert testbed.run(SCRIPT, "given", "3", nsys=True).exit_code == 3


@STRONGEST_SANDBOX
def test_machine_without_nsys_refuses_with_a_fix(
    testbed: LauncherTestbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    launch = testbed.launch(SCRIPT, "given", "0", nsys=True)
    monkeypatch.setattr("falaj.drivers.processes.nsys.INSTALL_PATTERNS", ("nonexistent/nsys",))

    with pytest.raises(InvalidInput) as refusal:
        testbed.launcher().start(launch)

    fault = refusal.value.faults[0]
    assert fault.where == "nsys"
    assert "not installed" in str(fault.given)
    assert fault.fix is not None
    assert "nsight-systems-cli" in fault.fix
    assert testbed.launcher().state(launch.attempt).phase == "unknown"


def test_nsys_is_found_where_its_packages_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    program = tmp_path / "opt/nvidia/nsight-systems-cli/2026.1/bin/nsys"
    program.parent.mkdir(parents=True)
    program.touch()

    assert find_nsys(LAUNCH, root=tmp_path) == str(program)
    assert nsys_folders(str(program)) == [program.parents[1]]
    assert nsys_folders("/usr/local/cuda/bin/nsys") == []


def test_program_that_starts_the_ranks_has_one_report_for_all() -> None:
    launch = replace(LAUNCH, framework="torch", processes=4)

    [only] = under_nsys("/opt/nsys", plan_ranks(launch, lambda count: [1] * count), launch)

    assert only["command"][:2] == ["/opt/nsys", "profile"]
    assert "--output=/jobs/1/outputs/all-ranks" in only["command"]
    assert f"--local-addr={LOOPBACK}" in only["command"]


def test_launch_without_profiling_does_not_use_nsys() -> None:
    launch = replace(LAUNCH, nsys=False)
    ranks = plan_ranks(launch)

    assert find_nsys(launch) is None
    assert json.dumps(under_nsys(None, ranks, launch)) == json.dumps(ranks)
