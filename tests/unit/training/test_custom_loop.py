"""`fj.step` in a custom loop: the losses of a plain loop and of `fit`, by a plan, with a state to resume from."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import falaj as fj
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.errors import CheckpointMismatch, InvalidTraining, OutOfMemory
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.step.out_of_memory import is_out_of_memory

mse = nn.functional.mse_loss
SAMPLES, BATCH = 40, 8
PLAN = BatchPlan(SAMPLES, BATCH, seed=0)
PLAIN: dict[str, Any] = {"tune": "off", "device": "cpu"}


def rows() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(2))
    return inputs, inputs.sum(1, keepdim=True)


def make_model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))


def batches(first: int = 1, last: int = 10) -> list[tuple[Tensor, Tensor]]:
    inputs, target = rows()
    return [(inputs[each], target[each]) for each in map(PLAN.indices, range(first, last + 1))]


def losses(step: Any, given: list[Any]) -> list[float]:
    return [step(batch).item() for batch in given]


def plain_loop(dropout: float = 0.0) -> list[float]:
    model = make_model(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for inputs, target in batches():
        loss = mse(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_step_gives_the_losses_of_a_plain_loop_with_its_own_random_numbers() -> None:
    assert losses(fj.step(make_model(), mse, **PLAIN), batches()) == plain_loop()
    assert losses(fj.step(make_model(0.3), mse, **PLAIN), batches()) == plain_loop(0.3)


def test_with_a_seed_it_gives_the_losses_of_fit() -> None:
    fitted = fj.fit(make_model(0.3), mse, rows(), steps=10, batch_size=BATCH, clip=1.0, seed=0, **PLAIN)

    own = losses(fj.step(make_model(0.3), mse, clip=1.0, seed=0, **PLAIN), batches())

    assert own == fitted.losses


def test_a_batch_may_be_a_dict_or_of_another_size() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            found: Tensor = self.net(batch["x"])
            return found

    named = [{"x": inputs, "y": target} for inputs, target in batches()]
    step = fj.step(ByName(), lambda out, batch: mse(out, batch["y"]), **PLAIN)

    assert losses(step, named) == plain_loop()
    assert step({"x": torch.zeros(3, 4), "y": torch.zeros(3, 1)}).dim() == 0
    assert step.number == 11


def test_micro_batches_add_up_to_the_batch() -> None:
    parts = losses(fj.step(make_model(), mse, accumulate=3, **PLAIN), batches())

    assert parts == pytest.approx(plain_loop(), rel=1e-5)


def test_a_scalar_in_a_batch_is_the_same_for_all_micro_batches() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 1)

        def forward(self, rows: Tensor, by: Tensor) -> Tensor:
            return by * self.layer(rows)

    batch = torch.ones(8, 4), torch.tensor(2.0), torch.ones(8, 1)
    whole, pieces = (
        fj.step(Scaled(), mse, tune="off", device="cpu", accumulate=count)(batch) for count in (1, 4)
    )

    assert pieces.item() == pytest.approx(whole.item())


@pytest.mark.parametrize(
    "words", ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"]
)
def test_out_of_memory_messages_of_libraries_are_recognized(words: str) -> None:
    assert is_out_of_memory(RuntimeError(words))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_out_of_memory_reduces_the_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def forward(self, given: Tensor) -> Tensor:
            if len(given) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            found: Tensor = self.net(given)
            return found

    step = fj.step(Large(), mse, **PLAIN)

    assert losses(step, batches()) == pytest.approx(plain_loop(), rel=1e-5)
    assert "continuing with 4 micro-batches per global batch" in capsys.readouterr().out
    assert step.state_dict()["pieces"] == 4


def test_memory_too_small_for_one_sample_is_reported() -> None:
    class Huge(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemory, match="out of memory at step 1"):
        fj.step(Huge(4, 1), mse, **PLAIN)(batches()[0])


def test_the_loop_may_set_the_learning_rate() -> None:
    step = fj.step(make_model(), mse, lr=0.1, optimizer="sgd", **PLAIN)
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, step_size=1, gamma=0.0)
    weights = []
    for batch in batches(1, 3):
        step(batch)
        schedule.step()
        weights.append(float(step._model[0].weight.detach().sum()))

    assert weights[0] == weights[1] == weights[2]


def test_a_given_optimizer_is_used_unchanged() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    step = fj.step(model, mse, optimizer=optimizer, **PLAIN)

    assert step.optimizer is optimizer


# -------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_state_needs_no_pickle_and_resumes_exactly(precision: str) -> None:
    options = {**PLAIN, "precision": precision, "seed": 3}
    straight = losses(fj.step(make_model(0.3), mse, **options), batches())
    first = fj.step(make_model(0.3), mse, **options)
    begun = losses(first, batches(1, 5))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)

    file.seek(0)
    torch.manual_seed(9)
    second = fj.step(make_model(0.3), mse, **options)
    second.load_state_dict(torch.load(file, weights_only=True))

    assert begun + losses(second, batches(6, 10)) == straight


def test_an_invalid_state_is_refused() -> None:
    with pytest.raises(InvalidTraining, match="without buffers, number, optimizer, pieces, plan, scaler"):
        fj.step(make_model(), mse, **PLAIN).load_state_dict({"model": {}})


def test_the_state_of_another_model_or_optimizer_is_refused() -> None:
    state = stepped(fj.step(make_model(), mse, **PLAIN)).state_dict()

    with pytest.raises(CheckpointMismatch, match="another model"):
        fj.step(nn.Linear(4, 1), mse, **PLAIN).load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="another optimizer"):
        fj.step(make_model(), mse, optimizer="sgd", **PLAIN).load_state_dict(state)


def test_the_state_restores_the_learning_rate_but_no_other_option() -> None:
    first = stepped(fj.step(make_model(), mse, **PLAIN))
    first.optimizer.param_groups[0]["lr"] = 0.5

    second = fj.step(make_model(), mse, tune=Plan(fused=True), device="cpu")
    second.load_state_dict(first.state_dict())

    (group,) = second.optimizer.param_groups
    assert (group["lr"], group["fused"]) == (0.5, True)


def stepped(step: Any) -> Any:
    step(batches()[0])
    return step


# -------------------------------------------------------------------------------------------------- plans


def test_a_plan_is_followed() -> None:
    step = fj.step(make_model(), mse, tune=Plan(fused=True, micro_batches=2), device="cpu")

    assert losses(step, batches()) == pytest.approx(plain_loop(), rel=1e-5)
    assert step.optimizer.defaults["fused"]
    assert step.plan == Plan(fused=True, micro_batches=2)


@pytest.mark.slow
def test_a_plan_is_searched_on_the_first_batch_and_kept_in_the_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path))
    step = fj.step(make_model(), mse, compile=False, device="cpu", tune_seconds=2.0)
    with pytest.raises(InvalidTraining, match="chosen on the first batch"):
        step.optimizer  # noqa: B018 - what it says

    found = losses(step, batches())

    assert "searching for the fastest plan" in capsys.readouterr().out
    assert found == pytest.approx(plain_loop(), rel=1e-3)
    other = fj.step(make_model(), mse, compile=False, device="cpu", tune_seconds=2.0)
    other.load_state_dict(step.state_dict())
    assert (other.plan, other.number) == (step.plan, 10)
    other(batches()[0])
    assert capsys.readouterr().out == ""  # it did not search again


def test_a_short_loop_has_no_plan_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert losses(fj.step(make_model(), mse, steps=10, device="cpu"), batches()) == plain_loop()
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    "batch", [(), torch.tensor(1.0), "words", (torch.zeros(0, 4), torch.zeros(0, 1))], ids=str
)
def test_an_invalid_batch_is_refused(batch: Any) -> None:
    with pytest.raises(InvalidTraining, match="tensors with a row per sample"):
        fj.step(make_model(), mse, **PLAIN)(batch)


def test_wrong_options_are_named_at_once() -> None:
    with pytest.raises(InvalidTraining) as refusal:
        fj.step(make_model(), mse, lr=-1.0, precision="fp8", optimizer="magic", device="abacus")  # type: ignore[arg-type]

    assert {fault.where for fault in refusal.value.faults} == {"lr", "precision", "optimizer", "device"}


def test_a_pipeline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from falaj.training.runtime import custom_loop
    from falaj.training.runtime.parallel.process_group import ProcessGroup

    monkeypatch.setattr(custom_loop, "join_process_group", lambda _: ProcessGroup(0, 2))

    with pytest.raises(InvalidTraining, match="a pipeline needs its batches in advance"):
        fj.step(make_model(), mse, parallel="pipeline", **PLAIN)


# --------------------------------------------------------------------------------------------- processes


@pytest.mark.slow
def test_data_parallel_processes_give_the_losses_of_one_process(tmp_path: Path) -> None:
    requests = [(1, {}), (2, {}), (2, {"accumulate": 2}), (2, {"parallel": "fsdp"})]
    script = str(Path(__file__).with_name("parallel_step.py"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, script, json.dumps(requests), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    (alone,), *spread = json.loads(ran.stdout)
    for each in spread:
        assert each == [pytest.approx(alone, rel=1e-5)] * 2
