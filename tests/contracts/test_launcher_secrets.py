"""The Launcher contract, fifth part: secrets reach the code, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from falaj.drivers.processes.folder import Folder, write
from falaj.drivers.processes.order import Order
from falaj.errors import InvalidInput
from launching import ATTEMPT, STRONGEST, Yard

SECRET = "s3cr3t-8c1f-value"
TELL_ALL = f"""
import os, sys
value = os.environ['TOKEN']
print('whole', value)
for letter in value + '\\n':
    os.write(1, letter.encode())
sys.exit('token was ' + value + ' {"x" * 10}')
"""


def test_secrets_reach_the_code_and_nothing_else(yard: Yard) -> None:
    launch = yard.launch(TELL_ALL + "\n", secrets={"TOKEN": SECRET})

    yard.launcher().start(launch)

    state = yard.end()
    assert yard.log().startswith(b"whole ***\n***\n")
    assert state.reason == "Exit code 1: token was *** xxxxxxxxxx"
    for path in [path for path in yard.root.rglob("*") if path.is_file()]:
        assert SECRET.encode() not in path.read_bytes(), path


def test_secrets_are_on_no_command_line_and_in_no_environment_of_ours(yard: Yard) -> None:
    launch = yard.launch("import time; print('up', flush=True); time.sleep(600)", secrets={"TOKEN": SECRET})

    yard.launcher().start(launch)

    yard.wait_for(b"up")
    (shim,) = yard.shims()
    assert SECRET.encode() not in Path(f"/proc/{shim}/environ").read_bytes()
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in lines if SECRET.encode() in line]


@STRONGEST
@pytest.mark.parametrize(("name", "value"), [("A=B", SECRET), ("", SECRET), ("TOKEN", SECRET + "\0")])
def test_secret_that_is_no_variable_is_refused_without_being_shown(yard: Yard, name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        yard.launcher().start(yard.launch("pass", secrets={name: value}))

    assert SECRET not in str(refused.value) + repr(refused.value.faults)


@STRONGEST
@pytest.mark.parametrize("sent", [b"", b'{"TOKEN": "s3cr3t-8c1'])
def test_shim_whose_secrets_did_not_come_whole_starts_nothing_and_another_start_does(
    yard: Yard, sent: bytes
) -> None:
    launch = yard.launch("import os; print(len(os.environ['TOKEN']))", secrets={"TOKEN": SECRET})
    folder = Folder(yard.control / "job_1%2F1")
    folder.path.mkdir(parents=True)
    write(folder.launch, Order(launch, yard.walls, 1 << 20).to_json())
    shim = [sys.executable, "-m", "falaj.drivers.processes.shim", str(folder.path)]

    done = subprocess.run(shim, input=sent, capture_output=True)  # as when its caller is killed meanwhile

    assert done.returncode == 1
    assert b"s3cr3t" not in done.stdout + done.stderr
    assert yard.launcher().state(ATTEMPT).phase == "unknown"
    yard.launcher().start(launch)
    assert yard.end().exit_code == 0
    assert yard.log() == b"17\n"


@STRONGEST
def test_secret_takes_no_gpu_that_was_not_handed_out(yard: Yard) -> None:
    script = "import os; print([os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS']])"

    yard.run(script, secrets={"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "7"})

    assert yard.log() == b"['', '7']\n"


def test_no_core_of_a_process_with_secrets_is_written(yard: Yard) -> None:
    script = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"

    yard.run(script, secrets={"TOKEN": SECRET})

    assert yard.log() == b"(0, 0)\n"


@STRONGEST
def test_values_are_hidden_where_the_whole_environment_is_printed(yard: Yard) -> None:
    odd = "pa\\ss'w\"örd\ttoken"
    script = "import json, os; print(os.environ); print(json.dumps(dict(os.environ)))"

    yard.run(script, secrets={"TOKEN": odd})

    said = yard.log()
    assert said.count(b"***") == 2, said
    assert b"rd" + rb"\ttoken" not in said
