"""The Launcher contract, part five: secrets reach the code and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from falaj.drivers.processes.attempt_folder import AttemptFolder, write_json
from falaj.drivers.processes.attempt_spec import AttemptSpec
from falaj.errors import InvalidInput
from launcher_testbed import ATTEMPT, STRONGEST_SANDBOX, LauncherTestbed

SECRET = "s3cr3t-8c1f-value"
TELL_ALL = f"""
import os, sys
value = os.environ['TOKEN']
print('whole', value)
for letter in value + '\\n':
    os.write(1, letter.encode())
sys.exit('token was ' + value + ' {"x" * 10}')
"""


def test_secrets_reach_the_code_and_nothing_else(testbed: LauncherTestbed) -> None:
    launch = testbed.launch(TELL_ALL + "\n", secrets={"TOKEN": SECRET})

    testbed.launcher().start(launch)

    state = testbed.end()
    assert testbed.log().startswith(b"whole ***\n***\n")
    assert state.reason == "Exit code 1: token was *** xxxxxxxxxx"
    for path in [path for path in testbed.root.rglob("*") if path.is_file()]:
        assert SECRET.encode() not in path.read_bytes(), path


def test_secrets_are_in_no_command_line_and_no_platform_environment(testbed: LauncherTestbed) -> None:
    launch = testbed.launch(
        "import time; print('up', flush=True); time.sleep(600)", secrets={"TOKEN": SECRET}
    )

    testbed.launcher().start(launch)

    testbed.wait_for(b"up")
    (supervisor,) = testbed.supervisors()
    assert SECRET.encode() not in Path(f"/proc/{supervisor}/environ").read_bytes()
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in lines if SECRET.encode() in line]


@STRONGEST_SANDBOX
@pytest.mark.parametrize(("name", "value"), [("A=B", SECRET), ("", SECRET), ("TOKEN", SECRET + "\0")])
def test_secret_with_an_invalid_variable_name_is_refused_without_showing_it(
    testbed: LauncherTestbed, name: str, value: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        testbed.launcher().start(testbed.launch("pass", secrets={name: value}))

    assert SECRET not in str(refused.value) + repr(refused.value.faults)


@STRONGEST_SANDBOX
@pytest.mark.parametrize("sent", [b"", b'{"TOKEN": "s3cr3t-8c1'])
def test_shim_with_truncated_secrets_starts_nothing_and_a_second_start_works(
    testbed: LauncherTestbed, sent: bytes
) -> None:
    launch = testbed.launch("import os; print(len(os.environ['TOKEN']))", secrets={"TOKEN": SECRET})
    folder = AttemptFolder(testbed.control / "job_1%2F1")
    folder.path.mkdir(parents=True)
    write_json(folder.launch, AttemptSpec(launch, testbed.sandbox, 1 << 20).to_json())
    supervisor = [sys.executable, "-m", "falaj.drivers.processes.supervisor", str(folder.path)]

    done = subprocess.run(supervisor, input=sent, capture_output=True)  # as if its caller were killed

    assert done.returncode == 1
    assert b"s3cr3t" not in done.stdout + done.stderr
    assert testbed.launcher().state(ATTEMPT).phase == "unknown"
    testbed.launcher().start(launch)
    assert testbed.end().exit_code == 0
    assert testbed.log() == b"17\n"


@STRONGEST_SANDBOX
def test_secret_cannot_override_visible_gpus(testbed: LauncherTestbed) -> None:
    script = "import os; print([os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS']])"

    testbed.run(script, secrets={"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "7"})

    assert testbed.log() == b"['', '7']\n"


def test_no_core_dump_of_a_process_with_secrets_is_written(testbed: LauncherTestbed) -> None:
    script = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"

    testbed.run(script, secrets={"TOKEN": SECRET})

    assert testbed.log() == b"(0, 0)\n"


@STRONGEST_SANDBOX
def test_values_are_hidden_where_the_whole_environment_is_printed(testbed: LauncherTestbed) -> None:
    odd = "pa\\ss'w\"örd\ttoken"
    script = "import json, os; print(os.environ); print(json.dumps(dict(os.environ)))"

    testbed.run(script, secrets={"TOKEN": odd})

    logged = testbed.log()
    assert logged.count(b"***") == 2, logged
    assert b"rd" + rb"\ttoken" not in logged
