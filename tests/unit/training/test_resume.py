"""A killed run resumes with bitwise equal losses and the same samples."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from falaj.training.runtime.agent.agents import FolderAgent, read_metrics
from falaj.training.runtime.checkpointing.sample_ledger import expected_head
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.errors import CheckpointDamaged, CheckpointMismatch, InvalidTraining
from falaj.training.runtime.fit import FitResult, fit

DOOMED = Path(__file__).with_name("killed_fit.py")
SAMPLES, BATCH_SIZE, STEPS = 92, 8, 60  # of killed_fit.py
DEATHS = 3


# ------------------------------------------------------------------------------------------- kill -9


@pytest.mark.slow
def test_a_run_killed_at_random_moments_gives_the_same_losses(tmp_path: Path) -> None:
    first = random.randrange(10**9)
    print(f"moments drawn from {first}")  # shown when the test fails
    rng = random.Random(first)
    deaths = [(rng.randint(2, 15), rng.uniform(0, 0.01)) for _ in range(DEATHS)]

    straight = spawn(tmp_path / "straight", [(0, 0)])
    killed = spawn(tmp_path / "killed", [*deaths, (0, 0)])

    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert killed == straight == f"{STEPS} {expected_head(BatchPlan(SAMPLES, BATCH_SIZE, seed=3), STEPS)}"


def spawn(folder: Path, moments: Sequence[tuple[int, float]]) -> str:
    """Run killed_fit.py in processes that die at `moments`: the step of a process, and seconds from there."""
    command = [
        sys.executable,
        str(DOOMED),
        str(folder),
        *(str(part) for moment in moments for part in moment),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def losses(folder: Path) -> dict[tuple[int, str], float]:
    """Return the logged losses by step; a step that ran twice must have equal losses."""
    found: dict[tuple[int, str], float] = {}
    for metric in read_metrics(folder):
        if metric.name not in ("loss", "evaluation"):
            continue  # throughput figures
        assert found.setdefault((metric.step, metric.name), metric.value) == metric.value
    assert {step for step, name in found if name == "loss"} == set(range(1, STEPS + 1))
    return found


# ------------------------------------------------------------------------------------- in one process


def make_model(hidden: int = 16, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Dropout(0.3), nn.Linear(hidden, 1))


def rows() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
    return inputs, inputs.sum(1, keepdim=True)


def short_fit(run: Path | FolderAgent, *, model: nn.Module | None = None, **changes: Any) -> FitResult:
    options: dict[str, Any] = {
        "batch_size": 8,
        "steps": 12,
        "checkpoint_every": 4,
        "device": "cpu",
        **changes,
    }
    return fit(model or make_model(), nn.functional.mse_loss, rows(), run=run, **options)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_more_steps_continue_where_the_first_ended(tmp_path: Path, precision: str) -> None:
    straight = short_fit(tmp_path / "straight", precision=precision)

    first = short_fit(tmp_path / "parts", steps=5, precision=precision)
    second = short_fit(tmp_path / "parts", model=make_model(seed=1), precision=precision)

    assert second.resumed_from == 5
    assert first.losses + second.losses == straight.losses
    assert second.ledger == straight.ledger


class StatefulOptimizer(optim.Optimizer):
    """Keeps its own, more precise copy of each parameter, and counters in its groups."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("precise", parameter.float())
                state.setdefault("steps", torch.zeros((), dtype=torch.int64)).add_(1)
                state["precise"] -= group["lr"] / group["count"] * parameter.grad.float()
                parameter.copy_(state["precise"])


def test_an_optimizer_resumes_with_its_own_types_and_counters(tmp_path: Path) -> None:
    def train(run: Path | None, steps: int, seed: int = 0) -> tuple[list[float], optim.Optimizer]:
        made: list[optim.Optimizer] = []
        data = tuple(each.bfloat16() for each in rows())
        result = fit(
            make_model(seed=seed).bfloat16(),
            nn.functional.mse_loss,
            data,
            batch_size=8,
            steps=steps,
            device="cpu",
            tune="off",
            run=run,
            optimizer=lambda parameters: made.append(StatefulOptimizer(parameters)) or made[0],  # type: ignore[func-returns-value]
        )
        return result.losses, made[0]

    straight, _ = train(None, 12)

    first, _ = train(tmp_path, 5)
    second, _ = train(tmp_path, 8, seed=1)
    third, optimizer = train(tmp_path, 12, seed=2)

    assert first + second + third == straight
    assert optimizer.param_groups[0]["count"] == 12
    kinds = {name: value.dtype for name, value in next(iter(optimizer.state.values())).items()}
    assert kinds == {"precise": torch.float32, "steps": torch.int64}


def test_the_learning_rate_comes_from_the_code_unless_changed_during_training(tmp_path: Path) -> None:
    made: list[optim.Optimizer] = []

    def make(lr: float) -> Callable[[Iterable[nn.Parameter]], optim.Optimizer]:
        def optimizer(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
            made.append(optim.SGD(parameters, lr=lr))
            return made[-1]

        return optimizer

    short_fit(tmp_path, steps=2, optimizer=make(0.1), tune="off")
    short_fit(tmp_path, steps=4, optimizer=make(0.2), tune="off")
    by_code = made[-1].param_groups[0]["lr"]
    lower = [lambda step, _: made[-1].param_groups[0].update(lr=0.3)]
    short_fit(tmp_path, steps=6, optimizer=make(0.2), tune="off", callbacks=lower)
    short_fit(tmp_path, steps=8, optimizer=make(0.2), tune="off")
    short_fit(tmp_path, steps=9, optimizer=make(0.2), tune="off")

    assert by_code == 0.2
    assert made[-1].param_groups[0]["lr"] == 0.3


def test_a_run_whose_agent_requests_a_stop_saves_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderAgent, "heartbeat", lambda _: False)

    result = short_fit(tmp_path)

    assert (result.stopped, result.step) == ("asked", 4)  # the first heartbeat came with the checkpoint
    monkeypatch.undo()
    assert short_fit(tmp_path).resumed_from == 4


@pytest.mark.parametrize("file", ["part-00000", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "altered", "emptied", "gone", "of another step"])
def test_a_damaged_newest_checkpoint_is_skipped_and_reported(
    tmp_path: Path, damage: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = short_fit(tmp_path)
    harm(newest(tmp_path) / file, damage)

    result = short_fit(tmp_path)

    assert result.resumed_from == 8
    assert result.losses == straight.losses[8:]
    assert "skipped the checkpoint of step 12" in capsys.readouterr().err


def test_a_run_does_not_restart_when_all_its_checkpoints_are_damaged(tmp_path: Path) -> None:
    short_fit(tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        harm(path / "part-00000", "altered")

    with pytest.raises(CheckpointDamaged, match=r"no checkpoint is valid \(steps 12, 8, 4\)"):
        short_fit(tmp_path)


def newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def harm(path: Path, damage: str) -> None:
    data = path.read_bytes()
    half = len(data) // 2
    if damage == "gone":
        path.unlink()
    elif damage == "of another step":
        other = min(path.parent.parent.iterdir()) / path.name
        path.write_bytes(other.read_bytes())
    else:
        altered = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        path.write_bytes({"cut": data[:half], "altered": altered, "emptied": b""}[damage])


def test_leftovers_of_a_crash_are_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    short_fit(tmp_path, steps=5)
    left = tmp_path / "checkpoints" / f".step-0000000009.{'0' * 32}"
    left.mkdir()
    (left / "part-00000").write_bytes(b"half")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('[6, "lo')

    short_fit(tmp_path)

    assert {metric.step for metric in read_metrics(tmp_path)} == set(range(1, 13))
    assert not left.exists()


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    short_fit(tmp_path, checkpoint_every=1)

    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step-{step:010}" for step in (10, 11, 12)
    ]


# ------------------------------------------------------------------------------------------ refusals


def test_a_checkpoint_of_another_model_is_refused_by_the_keys_that_differ(tmp_path: Path) -> None:
    short_fit(tmp_path)
    other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    with pytest.raises(CheckpointMismatch) as refusal:
        short_fit(tmp_path, model=other)

    words = str(refusal.value)
    assert "0.weight\n  given    float32 [16, 4] in the checkpoint\n  allowed  float32 [8, 4]" in words
    assert "2.weight\n  given    not in the checkpoint" in words
    assert "3.weight\n  given    not in the model" in words


@pytest.mark.parametrize(("option", "value"), [("seed", 7), ("batch_size", 4), ("drop_last", True)])
def test_other_batches_are_refused(tmp_path: Path, option: str, value: object) -> None:
    short_fit(tmp_path)

    with pytest.raises(CheckpointMismatch, match=f"other batches.*\n{option}\n"):
        short_fit(tmp_path, **{option: value})


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    short_fit(tmp_path)

    with pytest.raises(CheckpointMismatch, match="another optimizer"):
        short_fit(tmp_path, optimizer="sgd")


def test_a_change_that_only_affects_rounding_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short_fit(tmp_path, steps=5)

    short_fit(tmp_path, precision="bf16")

    assert "precision is bf16, was fp32" in capsys.readouterr().err


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    agent = FolderAgent(tmp_path)

    with pytest.raises(InvalidTraining, match="another run is using this folder"):
        short_fit(tmp_path)

    agent.close()
