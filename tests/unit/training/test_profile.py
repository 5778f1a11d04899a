"""`fit(profile=…)` on a CPU: a trace, shares that add up, and a summary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falaj.drivers.processes.supervisor.init_plan import free_ports
from falaj.training.runtime.agent.agents import read_metrics
from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.fit import fit
from falaj.training.runtime.profiling import profiler
from falaj.training.runtime.profiling.bottleneck import BottleneckReport
from falaj.training.runtime.profiling.events import read_trace
from polling import let_pass

ROWS = torch.randn(64, 8)

OF_TWO = """
import json, sys
import torch
from falaj.training.runtime.fit import fit
torch.set_num_threads(1)
rows = torch.randn(64, 8)
data = rows, rows[:, :1]
options = dict(batch_size=8, steps=10, profile=3, device="cpu", run=sys.argv[1])
found = fit(torch.nn.Linear(8, 1), torch.nn.functional.mse_loss, data, **options).profile
print(json.dumps(found and {"shares": found.shares, "took": found.overlap["communication"].took}))
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FALAJ_OUTPUTS", str(tmp_path / "outputs"))


def mse(found: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(found, target)


class Slow:
    """A dataset with slow samples."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        let_pass(0.002)
        return ROWS[index], ROWS[index, :1]


def profiled(folder: Path, data: Any = (ROWS, ROWS[:, :1]), **options: Any) -> BottleneckReport:
    given = {"batch_size": 8, "steps": 12, "profile": 4, "run": folder, "device": "cpu", "tune": "off"}
    found = fit(nn.Linear(8, 1), mse, data, **{**given, **options}).profile
    assert found is not None
    return found


@pytest.mark.slow
def test_shares_add_up_and_the_trace_has_the_parts_of_each_step(tmp_path: Path) -> None:
    found = profiled(tmp_path / "run")

    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.steps == 4
    assert all(found.shares[part] > 0 for part in ("forward", "backward", "optimizer"))
    assert found.trace is not None
    assert found.trace.endswith(".pt.trace.json")
    names = [event.name for event in read_trace(found.trace) if event.kind == "range"]
    parts = ("step", "data", "forward", "backward", "optimizer")
    counts = {part: names.count(f"falaj.{part}") for part in parts}
    assert counts.pop("step") == 4
    assert counts == dict.fromkeys(parts[1:], 5)  # with the step before, which already ran under the profiler


def test_slow_samples_are_reported_as_input_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = profiled(tmp_path / "run", Slow(), workers=0)

    assert found.bound == "input"
    assert found.shares["input"] > 0.5
    assert "workers=4" in found.sentence
    assert found.overlap["data"].took > 0
    assert found.sentence in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "params.json").read_text())["profile"] == found.sentence
    logged = {metric.name: metric.value for metric in read_metrics(tmp_path / "run")}
    assert logged["profile/input"] == pytest.approx(found.shares["input"])


def test_profile_does_not_change_the_losses(tmp_path: Path) -> None:
    losses = []
    for profile in (False, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        data = ROWS, ROWS[:, :1]
        result = fit(model, mse, data, batch_size=8, steps=12, profile=profile, run=tmp_path / str(profile))
        losses.append(result.losses)

    assert losses[0] == losses[1]


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_run_that_is_shorter_than_the_profile_is_profiled_to_its_end(tmp_path: Path, steps: int) -> None:
    found = profiled(tmp_path / "run", steps=steps, profile=True)

    assert 1 <= found.steps <= steps


def test_evaluations_and_checkpoints_are_not_part_of_a_step(tmp_path: Path) -> None:
    def look(_: nn.Module) -> float:
        let_pass(0.1)
        return 0.0

    found = profiled(tmp_path / "run", evaluate=look, evaluate_every=1, checkpoint_every=1)

    assert found.trace is not None
    steps = [each for each in read_trace(found.trace) if each.name == "falaj.step"]
    whole = sum(each.end - each.start for each in steps)
    assert found.step_seconds * found.steps <= whole - 3 * 0.1
    assert found.overlap["checkpoints"].took > 0


def test_profiler_hooks_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Any] = []
    end = profiler.StepProfiler.end

    def note(watch: profiler.StepProfiler) -> None:
        end(watch)
        engines.append(watch._engine)

    monkeypatch.setattr(profiler.StepProfiler, "end", note)
    profiled(tmp_path / "run", steps=20)

    assert all("advance" not in vars(engine) for engine in engines)
    assert all("update" not in vars(engine.step) and "take" not in vars(engine.loader) for engine in engines)


def test_profiler_that_fails_costs_the_profile_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> list[Any]:
        raise OSError("no space left")

    monkeypatch.setattr(profiler, "read_trace", broken)
    result = fit(
        nn.Linear(8, 1),
        mse,
        (ROWS, ROWS[:, :1]),
        batch_size=8,
        steps=12,
        profile=3,
        run=tmp_path,
        device="cpu",
    )

    assert result.profile is None
    assert result.step == 12
    assert "the profile failed (OSError: no space left); training continues" in capsys.readouterr().err


def test_run_that_fails_during_a_profile_raises_its_own_error(tmp_path: Path) -> None:
    def breaking(found: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 6:
            raise ZeroDivisionError
        return mse(found, target)

    calls: list[int] = []

    with pytest.raises(ZeroDivisionError):
        fit(nn.Linear(8, 1), breaking, (ROWS, ROWS[:, :1]), batch_size=8, steps=12, profile=10, run=tmp_path)

    assert profiled(tmp_path / "another").steps == 4


@pytest.mark.slow
def test_rank_0_reports_the_cost_of_communication(tmp_path: Path) -> None:
    [port] = free_ports(1)
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OF_TWO, str(tmp_path / "run")],
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    leader, other = (json.loads(process.communicate()[0]) for process in processes)

    assert sum(leader["shares"].values()) == pytest.approx(1.0)
    assert leader["shares"]["communication"] > 0
    assert leader["took"] > 0
    assert other is None


@pytest.mark.parametrize("given", ["fast", -1, 2.5])
def test_invalid_profile_option_is_refused(given: Any) -> None:
    with pytest.raises(InvalidTraining, match="profile"):
        fit(nn.Linear(8, 1), mse, (ROWS, ROWS[:, :1]), steps=1, profile=given)


def test_nvtx_without_cuda_is_refused_or_ignored_when_set_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(InvalidTraining, match="built without CUDA"):
        fit(nn.Linear(8, 1), mse, (ROWS, ROWS[:, :1]), steps=1, profile="nvtx")

    monkeypatch.setenv("FALAJ_NVTX", "1")
    assert fit(nn.Linear(8, 1), mse, (ROWS, ROWS[:, :1]), batch_size=8, steps=2).step == 2


def test_nvtx_ranges_are_around_steps_and_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    seen: list[str] = []

    @contextmanager
    def noting(name: str) -> Any:
        seen.append(f"+{name}")
        yield
        seen.append(f"-{name}")

    monkeypatch.setattr("torch.cuda.nvtx.range", noting)
    monkeypatch.setattr("falaj.training.runtime.options.has_nvtx", lambda: True)
    monkeypatch.setenv("FALAJ_NVTX", "1")
    data = ROWS, ROWS[:, :1]
    fit(nn.Linear(8, 1), mse, data, batch_size=8, steps=12, profile=2, device="cpu", run=tmp_path)
    steps_with_a_profile = [each for each in seen if each.startswith("+falaj.step")]
    seen.clear()
    fit(nn.Linear(8, 1), mse, (ROWS, ROWS[:, :1]), batch_size=8, steps=1, profile="nvtx", device="cpu")

    parts = [f"{sign}falaj.{name}" for name in ("data", "forward", "backward", "optimizer") for sign in "+-"]
    assert seen == ["+falaj.step 1", *parts, "-falaj.step 1"]
    assert len(steps_with_a_profile) == 12
