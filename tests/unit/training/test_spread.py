"""A run over several processes gives what one process gives, and is taken up by any number of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from falaj.training.runtime.batches import BatchPlan
from falaj.training.runtime.ledger import expected_head

SCRIPT = Path(__file__).with_name("spread_fit.py")
SAMPLES, BATCH_SIZE, STEPS = 92, 16, 12
LEDGER = expected_head(BatchPlan(SAMPLES, BATCH_SIZE, seed=3), STEPS)


class Outcome(NamedTuple):
    losses: list[str]
    weights: str
    resumed_from: int

    @property
    def died(self) -> bool:
        return not self.losses

    @property
    def figures(self) -> list[float]:
        return [float.fromhex(each) for each in self.losses]


WAYS: dict[int, list[Any]] = {
    2: ["ddp", "fsdp", "tensor"],
    4: ["ddp", "fsdp", {"ddp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2}],
}


@pytest.mark.parametrize("processes", [2, 4])
def test_every_way_gives_the_losses_of_one_process(tmp_path: Path, processes: int) -> None:
    ways = [(processes, {"parallel": way, "accumulate": 4}) for way in WAYS[processes]]

    alone, *spread = runs(tmp_path, (1, {"accumulate": 4}), *ways)

    for found in spread:
        assert found.figures == pytest.approx(alone.figures, rel=2e-5)
        assert float.fromhex(found.weights) == pytest.approx(float.fromhex(alone.weights), rel=1e-3)


def test_exact_runs_are_equal_to_the_bit_with_1_2_and_4_processes(tmp_path: Path) -> None:
    options = {"exact": True, "dropout": 0.3, "unused": True}

    found = runs(tmp_path, *((count, options) for count in (1, 2, 4)))

    assert found[0].losses == found[1].losses == found[2].losses
    assert len({each.weights for each in found}) == 1


def test_an_exact_run_is_killed_and_taken_up_by_another_number_of_processes(tmp_path: Path) -> None:
    first = random.randrange(10**9)
    print(f"moments drawn from {first}")
    dice = random.Random(first)
    same = {"exact": True, "dropout": 0.3}
    kept = same | {"run": str(tmp_path / "run"), "checkpoint_every": 2}
    deaths = [
        (count, kept | {"deadly": {str(dice.randrange(count)): dice.randint(1, 80 // count)}})
        for count in (2, 4)
    ]

    straight, *dead, last = runs(tmp_path, (1, same), *deaths, (1, kept))

    assert [each.died for each in dead] == [True, True]
    assert last.losses == straight.losses[last.resumed_from :]
    assert last.weights == straight.weights


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_run_goes_on_to_the_bit_with_as_many_processes(tmp_path: Path, parallel: str) -> None:
    same = {"parallel": parallel, "dropout": 0.3, "checkpoint_every": 3}
    kept = same | {"run": str(tmp_path / "run")}

    straight, dead, again = runs(tmp_path, (2, same), (2, kept | {"deadly": {"1": 50}}), (2, kept))

    assert dead.died
    assert again.resumed_from > 0
    assert again.losses == straight.losses[again.resumed_from :]
    assert again.weights == straight.weights


def test_shards_are_taken_up_by_another_number_of_processes(tmp_path: Path) -> None:
    kept = {"parallel": "fsdp", "run": str(tmp_path / "run"), "checkpoint_every": 2, "accumulate": 4}

    alone, _, _, last = runs(
        tmp_path, (1, {"accumulate": 4}), (2, kept | {"steps": 5}), (4, kept | {"steps": 9}), (1, kept)
    )

    assert last.resumed_from == 9
    assert last.figures == pytest.approx(alone.figures[9:], rel=2e-5)


def runs(folder: Path, *wanted: tuple[int, dict[str, Any]]) -> list[Outcome]:
    """What came of runs over so many processes. All of one run must say the same, and have seen every sample."""
    asked = [(count, {"batch_size": BATCH_SIZE, "steps": STEPS} | options) for count, options in wanted]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(asked), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(done.stderr)
    return [outcome(each) for each in found]


def outcome(said: list[dict[str, Any] | None]) -> Outcome:
    first = said[0]
    assert all(each == first for each in said)
    if first is None:
        return Outcome([], "", 0)
    if first["step"] == STEPS:
        assert first["ledger"] == LEDGER
    return Outcome(first["losses"], first["weights"], first["from"])
