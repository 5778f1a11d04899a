"""Programs of torch.export in a worker: dynamic and fixed batches, several tensors, types and names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from falaj.errors import InvalidInput, Unavailable
from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.settings import ServingSettings
from falaj.records.serving.tensors import DYNAMIC, Datatype, Tensor
from falaj.serving.runtime.engine import ModelEngine
from falaj.serving.runtime.loading import open_model
from framework_models import rows, torch_bytes, torch_module

FILE = ServedFile(model="m", version="1", format=FileFormat.TORCH_EXPORT)


@contextmanager
def opened(content: bytes, file: ServedFile = FILE) -> Iterator[ModelEngine]:
    engine = open_model(file, content)
    try:
        yield engine
    finally:
        engine.close()


class TwoHeads(torch.nn.Module):
    def forward(self, tokens: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        mean = (tokens.float() * weight[:, None]).mean(dim=1)
        return {"mean": mean, "half": mean.to(torch.bfloat16)}


class Centred(torch.nn.Module):
    """A row's answer depends on the other rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=0)


def test_a_program_with_a_dynamic_batch_answers_as_the_module_does() -> None:
    module, given = torch_module(), rows(1000)
    with torch.inference_mode():
        wanted = module(torch.from_numpy(given)).numpy()

    with opened(torch_bytes(module, torch.randn(3, 4))) as engine:
        assert engine.model.inputs == (Tensor(name="input", datatype=Datatype.FP32, shape=(DYNAMIC, 4)),)
        assert engine.model.outputs == (Tensor(name="output", datatype=Datatype.FP32, shape=(DYNAMIC, 2)),)
        assert engine.cost.rows > 1
        for count in (1, 7, 1000):
            np.testing.assert_allclose(engine.run([given[:count]])[0], wanted[:count], atol=1e-5)


def test_several_inputs_and_outputs_keep_their_names_and_types() -> None:
    tokens = np.arange(8).reshape(2, 4)
    weight = np.array([1, 2], np.float32)
    file = FILE.model_copy(
        update={
            "outputs": (
                Tensor(name="mean", datatype=Datatype.FP32, shape=(DYNAMIC,)),
                Tensor(name="half", datatype=Datatype.BF16, shape=(DYNAMIC,)),
            )
        }
    )

    with opened(torch_bytes(TwoHeads(), torch.ones(3, 4, dtype=torch.int64), torch.ones(3)), file) as engine:
        mean, half = engine.run([tokens, weight])

    assert [tensor.name for tensor in engine.model.inputs] == ["tokens", "weight"]
    assert [tensor.name for tensor in engine.model.outputs] == ["mean", "half"]
    assert mean.tolist() == [1.5, 11.0]
    assert half.dtype == np.float32
    assert half.tolist() == [1.5, 11.0]


def test_a_fixed_batch_is_padded() -> None:
    module, given = torch_module(), rows(19)
    with torch.inference_mode():
        wanted = module(torch.from_numpy(given)).numpy()

    with opened(torch_bytes(module, torch.randn(8, 4), has_dynamic_rows=False)) as engine:
        assert engine.model.inputs[0].shape == (DYNAMIC, 4)
        for count in (1, 8, 9, 19):
            np.testing.assert_allclose(engine.run([given[:count]])[0], wanted[:count], atol=1e-5)


def test_a_fixed_batch_whose_rows_depend_on_each_other_is_not_padded() -> None:
    with opened(torch_bytes(Centred(), torch.randn(8, 4), has_dynamic_rows=False)) as engine:
        assert engine.model.inputs[0].shape == (8, 4)


def test_a_signature_that_is_not_that_of_the_file_is_refused() -> None:
    lie = (Tensor(name="x", datatype=Datatype.FP32, shape=(DYNAMIC, 9)),)

    with pytest.raises(
        InvalidInput, match="the registered signature of m@1 is not that of its file"
    ) as found:
        open_model(FILE.model_copy(update={"inputs": lie}), torch_bytes(torch_module(), torch.randn(3, 4)))
    assert "allowed  input (FP32 [-1, 4])" in str(found.value)


def test_a_gpu_that_is_not_there_is_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    file = FILE.model_copy(update={"settings": ServingSettings(device="gpu")})

    with pytest.raises(Unavailable, match=r"is to run on a GPU, and torch .* finds none"):
        open_model(file, torch_bytes(torch_module(), torch.randn(3, 4)))


@pytest.mark.slow
def test_a_compiled_program_answers_the_same() -> None:
    module, given = torch_module(), rows(5)
    file = FILE.model_copy(update={"settings": ServingSettings(compiled=True)})

    with opened(torch_bytes(module, torch.randn(3, 4)), file) as engine:
        (answer,) = engine.run([given])

    with torch.inference_mode():
        np.testing.assert_allclose(answer, module(torch.from_numpy(given)).numpy(), atol=1e-5)
