"""How batches reach the model and the loss: keywords, the model's own loss, losses over the whole output."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import falaj as fj
from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.memory.estimate import estimate

ROWS = 40
WORDS = torch.randint(0, 50, (ROWS, 6), generator=torch.Generator().manual_seed(1))
LABELS = WORDS.sum(1) % 3
TEXTS = {"input_ids": WORDS, "attention_mask": torch.ones_like(WORDS), "labels": LABELS}
mse, cross_entropy = nn.functional.mse_loss, nn.functional.cross_entropy


@dataclass
class ModelOutput:
    """The output of a Hugging Face model."""

    loss: Tensor | None
    logits: Tensor


class Classifier(nn.Module):
    """A text classifier with the signature of Hugging Face models."""

    def __init__(self, form: str = "object") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.form = nn.Embedding(50, 8), nn.Linear(8, 3), form

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> Any:
        logits = self.head(self.words(input_ids).mean(1))
        loss = None if labels is None else cross_entropy(logits, labels)
        if self.form == "tuple":
            return (logits,) if loss is None else (loss, logits)
        return {"loss": loss, "logits": logits} if self.form == "dict" else ModelOutput(loss, logits)


class Logits(Classifier):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = self.head(self.words(input_ids).mean(1))
        return found


def train(model: Any, loss: Any, data: Any, **changes: Any) -> FitResult:
    return fit(model, loss, data, **{"steps": 8, "batch_size": 8, "device": "cpu", "tune": "off", **changes})


def expected(**changes: Any) -> list[float]:
    return train(Logits(), cross_entropy, (WORDS, LABELS), **changes).losses


# ------------------------------------------------------------------------------ the loss of the model


@pytest.mark.parametrize("form", ["object", "dict", "tuple"])
def test_a_model_of_hugging_face_trains_on_dicts_by_its_own_loss(form: str) -> None:
    assert train(Classifier(form), None, TEXTS).losses == expected()


def test_samples_that_are_dicts_become_keywords() -> None:
    samples = [{name: values[row] for name, values in TEXTS.items()} for row in range(ROWS)]

    assert train(Classifier(), None, samples).losses == expected()


def test_a_model_may_return_the_loss_alone_or_beside_its_output() -> None:
    class Language(nn.Module):
        """Called with (inputs, targets), as many examples are."""

        def __init__(self, alone: bool) -> None:
            super().__init__()
            self.net, self.alone = Logits(), alone

        def forward(self, ids: Tensor, targets: Tensor) -> Any:
            logits = self.net(ids)
            loss = cross_entropy(logits, targets)
            return loss if self.alone else (logits, loss)

    for alone in (True, False):
        assert train(Language(alone), None, (WORDS, LABELS)).losses == expected()


def test_a_loss_of_one_parameter_gets_the_whole_output() -> None:
    def whole(output: ModelOutput) -> Tensor:
        assert output.loss is not None
        return output.loss + 0.0 * output.logits.square().mean()

    assert train(Classifier(), whole, TEXTS).losses == expected()
    assert train(Classifier("dict"), lambda output: output["loss"], TEXTS).losses == expected()


def test_a_loss_of_two_parameters_gets_any_output_and_the_target() -> None:
    class Distance(nn.Module):
        def forward(self, output: ModelOutput, target: Tensor) -> Tensor:
            return cross_entropy(output.logits, target)

    data = {"input_ids": WORDS, "labels": LABELS}

    assert train(Classifier(), Distance(), data, target="labels").losses == expected()
    assert train(Classifier(), lambda o, t: cross_entropy(o.logits, t), (WORDS, LABELS)).losses == expected()


def test_a_module_that_takes_the_output_alone_is_a_loss() -> None:
    class Whole(nn.Module):
        def forward(self, output: Mapping[str, Tensor]) -> Tensor:
            return output["loss"]

    assert train(Classifier("dict"), Whole(), TEXTS).losses == expected()
    assert train(
        Classifier("dict"), partial(lambda scale, output: scale * output["loss"], 1.0), TEXTS
    ).losses == (expected())


def test_several_named_inputs_and_targets_stay_dicts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(2, 2)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            found: Tensor = self.net(torch.cat([left, right], 1))
            return found

    left, right = torch.randn(ROWS, 1), torch.randn(ROWS, 1)
    data = {"left": left, "right": right, "sum": left + right, "product": left * right, "unused": left}

    def loss(out: Tensor, target: Mapping[str, Tensor]) -> Tensor:
        return mse(out, torch.cat([target["sum"], target["product"]], 1))

    found = train(Two(), loss, data, inputs=["right", "left"], target=["sum", "product"])

    both = torch.cat([left + right, left * right], 1)
    assert found.losses == train(Two(), mse, (left, right, both)).losses


def test_a_model_that_takes_a_dict_gets_it_whole() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Logits()

        def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
            found: Tensor = self.net(batch["input_ids"])
            return found

    found = train(Whole(), lambda out, batch: cross_entropy(out, batch["labels"]), TEXTS)

    assert found.losses == expected()


def test_the_models_own_loss_evaluates_splits_and_resumes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"evaluate_every": 4, "accumulate": 2, "precision": "bf16", "clip": 1.0}

    train(Classifier(), None, TEXTS, steps=3, run=tmp_path, evaluate=TEXTS, **options)
    found = train(Classifier(), None, TEXTS, run=tmp_path, evaluate=TEXTS, **options)

    straight = train(Logits(), cross_entropy, (WORDS, LABELS), evaluate=(WORDS, LABELS), **options)
    assert found.losses == straight.losses[3:]
    assert found.best == straight.best


def test_the_memory_of_a_model_with_its_own_loss_is_estimated() -> None:
    found = estimate(Classifier(), None, TEXTS, device="cuda", batch_size=8)

    assert found.method == "traced"
    assert found.parameters_bytes == estimate(Logits(), cross_entropy, (WORDS, LABELS)).parameters_bytes


def test_a_step_of_a_custom_loop_takes_dicts() -> None:
    step = fj.step(Classifier(), None, tune="off", device="cpu")
    batch = {name: values[:8] for name, values in TEXTS.items()}

    assert float(step(batch)) == pytest.approx(
        float(fj.step(Logits(), cross_entropy, tune="off", device="cpu")((WORDS[:8], LABELS[:8])))
    )


@pytest.mark.slow
def test_a_model_with_its_own_loss_is_compiled_and_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path))

    found = train(Classifier(), None, TEXTS, steps=30, compile=True)
    searched = train(Classifier(), None, TEXTS, steps=300, tune="auto", tune_seconds=2.0, compile=False)

    assert found.losses == pytest.approx(expected(steps=30), rel=1e-4)
    assert "torch.compile failed" not in capsys.readouterr().out
    assert searched.step == 300
    assert list((tmp_path / "plans").iterdir())


def test_a_model_without_a_loss_is_refused_with_a_fix() -> None:
    data = {"input_ids": WORDS}

    with pytest.raises(InvalidTraining, match="the model computes no loss") as refusal:
        train(Classifier(), None, data)

    assert "labels" in str(refusal.value)


@pytest.mark.parametrize("loss", [lambda: 0, lambda a, b, c: a, "mse", 3])
def test_a_loss_with_other_parameters_is_refused(loss: Any) -> None:
    with pytest.raises(
        InvalidTraining, match="a function of the model's output and the target, or of the output"
    ):
        train(Logits(), loss, (WORDS, LABELS))


def test_a_name_that_the_dict_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidTraining, match="no value label") as refusal:
        train(Logits(), cross_entropy, TEXTS, target="label")

    assert "input_ids, attention_mask, labels" in str(refusal.value)


# ---------------------------------------------------------------------------------- errors of the first step


def first_error(model: nn.Module, loss: Any, data: Any, **changes: Any) -> str:
    with pytest.raises(InvalidTraining) as refusal:
        train(model, loss, data, **changes)
    assert refusal.value.__cause__ is not None
    return str(refusal.value)


ROWS_OF_4, SUMS = torch.randn(ROWS, 4), torch.randn(ROWS, 1)


def test_a_layer_of_another_width_is_named_with_the_shapes() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Sequential(nn.ReLU(), nn.Linear(17, 1)))

    words = first_error(model, mse, (ROWS_OF_4, SUMS))

    assert words.splitlines()[0].endswith("(in the layer 1.1, at the first step)")
    assert "given    input: float32 [8, 16]" in words
    assert "allowed  Linear(in_features=17, out_features=1, bias=True)" in words
    assert "fix      in_features=16, or inputs with 17 columns" in words
    assert "given    (float32 [8, 4], float32 [8, 1])" in words


def test_inputs_of_another_type_are_named() -> None:
    words = first_error(nn.Linear(4, 1), mse, (ROWS_OF_4.double(), SUMS))

    assert "inputs of float32, the type of the weights, instead of float64" in words


def test_a_number_beyond_an_embedding_is_named() -> None:
    words = first_error(Logits(), cross_entropy, (WORDS + 10, LABELS))

    assert "the layer words" in words
    assert "num_embeddings of more than 5" in words


def test_a_loss_over_other_shapes_is_named() -> None:
    words = first_error(nn.Linear(4, 3), cross_entropy, (ROWS_OF_4, SUMS))

    assert "(in the loss, at the first step)" in words
    assert "output float32 [8, 3], target float32 [8, 1]" in words


@pytest.mark.filterwarnings("default:Using a target size")
@pytest.mark.parametrize("loss", [mse, nn.L1Loss(), nn.functional.huber_loss])
def test_a_target_that_the_loss_would_broadcast_is_refused(loss: Any) -> None:
    """Torch warns, and computes the losses of every output with every target."""
    words = first_error(nn.Linear(4, 1), loss, (ROWS_OF_4, SUMS[:, 0]))

    assert "(in the loss, at the first step)" in words
    assert "output float32 [8, 1], target float32 [8]" in words
    assert "fix      a target of the output's shape: target.unsqueeze(1)" in words


def test_a_model_that_takes_other_arguments_is_named() -> None:
    words = first_error(nn.Linear(4, 1), mse, (ROWS_OF_4, ROWS_OF_4, SUMS))

    assert "(in the model, at the first step)" in words
    assert "(float32 [8, 4], float32 [8, 4])" in words


def test_an_error_in_the_code_of_a_module_is_named() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(3, 3)

    words = first_error(nn.Sequential(nn.Linear(4, 4), Attention()), mse, (ROWS_OF_4, SUMS))

    assert "the layer 1" in words
    assert "x: float32 [8, 4]" in words


def test_a_loss_without_a_graph_in_its_backward_pass_is_named() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            raise RuntimeError("no derivative")

    words = first_error(nn.Linear(4, 1), lambda out, t: mse(Broken.apply(out), t), (ROWS_OF_4, SUMS))

    assert "no derivative (in the backward pass, at the first step)" in words


def test_an_error_of_the_users_own_type_keeps_it_and_gets_a_note() -> None:
    class Unprepared(Exception):
        pass

    class Picky(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            raise Unprepared("no tokenizer")

    with pytest.raises(Unprepared) as failure:
        train(nn.Sequential(nn.Linear(4, 4), Picky(4, 1)), mse, (ROWS_OF_4, SUMS))

    assert "the layer 1" in "".join(traceback.format_exception(failure.value))


def test_the_failure_of_another_process_is_left_alone() -> None:
    class Apart(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        train(Apart(4, 1), mse, (ROWS_OF_4, SUMS))


def test_later_errors_are_left_alone() -> None:
    class Late(nn.Linear):
        steps = 0

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            self.steps += 1
            if self.steps > 2:
                raise RuntimeError("later")
            return super().forward(input)

    with pytest.raises(RuntimeError, match=r"^later$"):
        train(Late(4, 1), mse, (ROWS_OF_4, SUMS))


def test_the_first_step_of_a_custom_loop_is_explained_too() -> None:
    step = fj.step(nn.Linear(5, 1), mse, tune="off", device="cpu")

    with pytest.raises(InvalidTraining, match="in_features=4"):
        step((ROWS_OF_4, SUMS))
