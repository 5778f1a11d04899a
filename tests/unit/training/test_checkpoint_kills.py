"""Killed at any disk access, in one process or several, a run resumes exactly from a complete checkpoint."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from falaj.training.runtime.checkpointing.storage.parts import PREFIX_BYTES

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("saving_fit.py")
STEPS = 12

Life = dict[str, Any]


def run_attempts(folder: Path, *wanted: Life) -> list[dict[str, Any] | None]:
    """Return the results of consecutive runs in one folder; None for those that were killed."""
    requests = [{"steps": STEPS, "checkpoint_every": 2} | each for each in wanted]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), json.dumps(requests)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any] | None] = json.loads(done.stdout)
    return found


def test_one_process_is_killed_while_it_saves(tmp_path: Path) -> None:
    first = random.randrange(10**9)
    print(f"moments drawn from {first}")
    rng = random.Random(first)
    dying = [{"processes": 1, "dies": {"0": rng.randint(1, 25)}} for _ in range(8)]

    straight, *_, last = run_attempts(tmp_path, {"processes": 1, "kept": False}, *dying, {"processes": 1})

    assert straight
    assert last
    assert last["losses"] == straight["losses"][last["from"] :]
    assert left_over(tmp_path) == []


def test_either_of_two_processes_is_killed_while_they_save(tmp_path: Path) -> None:
    first = random.randrange(10**9)
    print(f"moments drawn from {first}")
    rng = random.Random(first)
    exact = {"exact": True, "accumulate": 2}
    dying = [
        exact | {"processes": 2, "dies": {rank: rng.randint(1, most)}}
        for rank, most in (("0", 30), ("1", 6), ("0", 30), ("1", 6))
    ]

    alone = exact | {"processes": 1}
    straight, *dead, last = run_attempts(tmp_path, alone | {"kept": False}, *dying, alone)

    assert dead[0] is None
    assert straight
    assert last
    assert last["losses"] == straight["losses"][last["from"] :]
    assert left_over(tmp_path) == []


def test_a_run_resumes_in_any_layout_on_any_number_of_processes(tmp_path: Path) -> None:
    same = {"plain": True, "accumulate": 4}
    ways: list[Life] = [
        {"processes": 2, "parallel": "ddp", "steps": 3},
        {"processes": 4, "parallel": "fsdp", "steps": 5},
        {"processes": 2, "parallel": "tensor", "steps": 7},
        {"processes": 4, "parallel": {"fsdp": 2, "tensor": 2}, "steps": 9},
        {"processes": 1},
    ]

    straight, *parts = run_attempts(
        tmp_path, same | {"processes": 1, "kept": False}, *(same | way for way in ways)
    )

    assert straight
    assert [part and part["from"] for part in parts] == [0, 3, 5, 7, 9]
    spread = [loss for part in parts if part for loss in part["losses"]]
    assert figures(spread) == pytest.approx(figures(straight["losses"]), rel=1e-4)


def test_processes_agree_on_the_previous_checkpoint_when_a_part_is_damaged(tmp_path: Path) -> None:
    """Each process reads its own shards only: the damage is seen by one of them."""
    same = {"processes": 2, "parallel": "fsdp", "plain": True}
    (first,) = run_attempts(tmp_path, same | {"steps": 6})
    part = tmp_path / "run" / "checkpoints" / "step-0000000006" / "part-00001"
    data = bytearray(part.read_bytes())
    data[PREFIX_BYTES + int.from_bytes(data[8:16], "little")] ^= 1  # of its first tensor
    part.write_bytes(data)

    (again,) = run_attempts(tmp_path, same | {"steps": 8})

    assert first
    assert again
    assert again["from"] == 4
    assert again["losses"][:2] == first["losses"][4:]


def figures(losses: list[str]) -> list[float]:
    return [float.fromhex(each) for each in losses]


def left_over(folder: Path) -> list[str]:
    return [path.name for path in (folder / "run" / "checkpoints").iterdir() if path.name.startswith(".")]
