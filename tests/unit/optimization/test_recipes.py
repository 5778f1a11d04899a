"""Recipes on small networks of every type: what each makes, and what it says where it cannot."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from falaj.optimization.budgets import parse_budget
from falaj.optimization.runtime import gpu, quality
from falaj.optimization.runtime.candidates import Candidate, onnx_candidate, open_candidate
from falaj.optimization.runtime.conversion.onnx_graphs import operators
from falaj.optimization.runtime.evaluation_data import EvaluationRows
from falaj.optimization.runtime.export import export_onnx
from falaj.optimization.runtime.recipes import litert, quantization
from falaj.optimization.runtime.recipes.catalog import make_variant
from falaj.optimization.runtime.recipes.channel_groups import channel_groups, remove_channels
from falaj.optimization.runtime.recipes.recipe_input import RecipeInput, RecipeNotApplicable

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "optimization"))
import networks  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from conftest import Learnable  # type: ignore[attr-defined]

pytestmark = pytest.mark.slow

BUDGET = parse_budget("accuracy -0.05")


def small_image_network() -> nn.Module:
    return networks.ImageClassifier((8, 16, 16), activation=nn.SiLU, excite=True)  # type: ignore[no-any-return]


SMALL = {
    "mlp": (lambda: networks.Mlp(64), networks.tabular_rows, 4),
    "mobilenet": (
        lambda: networks.ImageClassifier((8, 16, 16), activation=nn.ReLU6, excite=False),
        networks.image_rows,
        6,
    ),
    "efficientnet": (small_image_network, networks.image_rows, 6),
    "transformer": (lambda: networks.TransformerEncoder(32, 1), networks.token_rows, 4),
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train the networks for some seconds, and save them as torch exports."""
    folder, made = tmp_path_factory.mktemp("exports"), {}
    torch.set_num_threads(1)
    for name, (build, rows, epochs) in SMALL.items():
        torch.manual_seed(3)
        known = rows(320, seed=1)
        made[name] = folder / f"{name}.pt2"
        networks.save_export(networks.train(build(), known, epochs=epochs), known, made[name])
    return made


def recipe_input(name: str, path: Path, *, budget: Any = BUDGET) -> RecipeInput:
    """Return what the job gives a recipe for a network."""
    original = open_candidate("original", path)
    assert original is not None
    known = SMALL[name][1](400, seed=2)
    predicted = quality.predict_all(original.predict, known.features)
    evaluator = quality.choose_evaluator(known.target.astype(float), predicted, metric=budget.metric)
    return RecipeInput(
        original,
        known.features[:64],
        EvaluationRows(known.features, known.target.astype(float)),
        evaluator,
        (),
        budget,
        ("avx2", "avx512_vnni"),
        training_s=60.0,
        log=lambda _: None,
    )


def agreement(given: RecipeInput, content: bytes) -> float:
    """Return the share of rows for which a variant chooses the same class as the original."""
    rows = given.rows.features
    made = quality.predict_all(onnx_candidate("variant", content).predict, rows)
    before = quality.predict_all(given.original.predict, rows)
    choose = (lambda p: p.argmax(1)) if before.shape[1] > 1 else (lambda p: p[:, 0] > 0.5)
    return float((choose(made) == choose(before)).mean())


def accuracy(given: RecipeInput, content: bytes | None = None) -> float:
    """Return the accuracy of a variant, or of the original, on the rows to learn from."""
    predict = given.original.predict if content is None else onnx_candidate("variant", content).predict
    judge = given.evaluator.of_rows(given.rows.target)
    made = quality.predict_all(predict, given.rows.features)
    return judge.score(made, "accuracy").metric_value()


@pytest.mark.parametrize("name", [*SMALL])
def test_every_network_is_exported_and_quantized_with_calibration(
    name: str, exports: dict[str, Path]
) -> None:
    given = recipe_input(name, exports[name])

    plain, static = make_variant("onnx", given), make_variant("int8-static", given)

    found = onnx.load_from_string(static.content)
    assert {"QuantizeLinear", "DequantizeLinear"} <= operators(found)
    assert agreement(given, plain.content) == 1.0
    assert agreement(given, static.content) > 0.9


def test_weights_are_quantized_by_channel_and_with_7_bits_where_8_would_overflow(
    exports: dict[str, Path],
) -> None:
    given = recipe_input("mlp", exports["mlp"])

    def largest(extensions: tuple[str, ...]) -> int:
        content = make_variant("int8-static", replace(given, extensions=extensions)).content
        weights = [
            onnx.numpy_helper.to_array(each)
            for each in onnx.load_from_string(content).graph.initializer
            if each.data_type == onnx.TensorProto.INT8 and len(each.dims) == 2
        ]
        scales = [
            each for each in onnx.load_from_string(content).graph.initializer if each.name.endswith("scale")
        ]
        assert any(len(each.dims) == 1 and each.dims[0] == 64 for each in scales)
        return max(int(np.abs(weight.astype(int)).max()) for weight in weights)

    assert largest(("avx2", "avx512_vnni")) == 127
    assert largest(("avx2",)) <= 64


@pytest.mark.parametrize("name", ["mlp", "mobilenet", "efficientnet", "transformer"])
def test_channels_are_removed_and_the_rest_is_fine_tuned(name: str, exports: dict[str, Path]) -> None:
    given = recipe_input(name, exports[name], budget=parse_budget("accuracy -0.3"))
    before = {key: each.clone() for key, each in given.original.source.state_dict.items()}

    made = make_variant("prune-structured", given)

    assert len(made.content) < 0.9 * len(make_variant("onnx", given).content)
    assert accuracy(given, made.content) > accuracy(given) - 0.3
    after = given.original.source.state_dict
    assert all(torch.equal(before[key], after[key]) for key in before), "the original was changed"


def test_removing_no_channel_that_matters_changes_nothing() -> None:
    """Channels whose weights are zero are the ones that go, and the network predicts the same without them."""
    torch.manual_seed(5)
    network = small_image_network().eval()
    block = network.blocks[0].block  # type: ignore[union-attr,index]
    with torch.no_grad():
        for layer in (block[0], block[1], block[3], block[4]):
            layer.weight[8:] = 0
            if layer.bias is not None:
                layer.bias[8:] = 0
    images = torch.randn(4, 3, 32, 32)
    module = torch.export.export(network, (images,)).module()
    groups = [
        group for group in channel_groups(module) if any("blocks.0.block.0" in n for n in group.producers)
    ]

    removed = remove_channels(module, groups, share=0.75)

    assert (len(groups), removed) == (1, 24)
    with torch.no_grad():
        assert torch.allclose(module(images), network(images), atol=1e-5)


def test_half_of_the_weights_become_zero(exports: dict[str, Path]) -> None:
    given = recipe_input("mlp", exports["mlp"], budget=parse_budget("accuracy -0.3"))

    made = onnx.load_from_string(make_variant("prune-unstructured", given).content)

    weights = [onnx.numpy_helper.to_array(each) for each in made.graph.initializer if len(each.dims) == 2]
    large = [each for each in weights if each.size > 1000]
    assert [round(float((each == 0).mean()), 1) for each in large] == [0.5] * len(large)


def test_the_first_trees_of_an_ensemble_are_kept(boosted: Any, rows: Learnable, tmp_path: Path) -> None:
    path = export_onnx(boosted, tmp_path / "model.onnx", sample=rows.holed[:64]).path
    given = tree_input(path, rows, "auc -0.2")

    made = onnx_candidate("pruned", make_variant("prune-structured", given).content)

    assert made.size_bytes < 0.8 * path.stat().st_size
    kept = [
        count
        for count in (5, 10, 20, 30)
        if np.allclose(
            made.predict(rows.holed[:50])[:, 0],
            boosted.predict_proba(rows.holed[:50], iteration_range=(0, count))[:, 1],
            atol=1e-5,
        )
    ]
    assert len(kept) == 1


def tree_input(path: Path, rows: Learnable, budget: str) -> RecipeInput:
    original = open_candidate("original", path)
    assert original is not None
    spelled = parse_budget(budget)
    predicted = quality.predict_all(original.predict, rows.holed)
    evaluator = quality.choose_evaluator(rows.target.astype(float), predicted, metric=spelled.metric)
    fitting = EvaluationRows(rows.holed, rows.target.astype(float))
    return RecipeInput(
        original, rows.holed[:64], fitting, evaluator, (), spelled, (), training_s=60, log=lambda _: None
    )


def test_the_student_of_a_training_job_is_taken_as_it_is(exports: dict[str, Path]) -> None:
    given = recipe_input("mlp", exports["mlp"])

    assert make_variant("distill", replace(given, student=b"a student")).content == b"a student"


# -------------------------------------------------------------------------------------------------- bad input


def test_without_a_student_the_recipe_says_why(exports: dict[str, Path]) -> None:
    given = recipe_input("mlp", exports["mlp"])

    with pytest.raises(RecipeNotApplicable, match="the job was cancelled"):
        make_variant("distill", replace(given, no_student="the job was cancelled"))
    with pytest.raises(RecipeNotApplicable, match="no student was trained"):
        make_variant("distill", given)


def test_pruning_that_costs_too_much_says_so(exports: dict[str, Path]) -> None:
    given = replace(recipe_input("mlp", exports["mlp"], budget=parse_budget("log_loss +0")), training_s=0.01)

    with pytest.raises(RecipeNotApplicable, match=r"fine-tuning: with .* log_loss is .* worse"):
        make_variant("prune-structured", given)


@pytest.mark.parametrize("recipe", ["int8-static", "prune-structured", "prune-unstructured"])
def test_a_recipe_that_learns_needs_rows(recipe: Any, exports: dict[str, Path]) -> None:
    given = recipe_input("mlp", exports["mlp"])
    empty = given.rows.take(np.array([], dtype=int))

    with pytest.raises(RecipeNotApplicable, match="learns from rows of the data, and there are none"):
        make_variant(recipe, replace(given, fitting=empty))


def test_a_model_that_does_not_convert_says_which_operator(tmp_path: Path) -> None:
    class Unusual(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(torch.special.bessel_j0(rows).sum(dim=1, keepdim=True))

    known = networks.tabular_rows(64)
    path = tmp_path / "model.pt2"
    networks.save_export(Unusual(), known, path)
    given = recipe_input("mlp", path)

    with pytest.raises(RecipeNotApplicable, match=r"the export to ONNX failed: .*bessel_j0"):
        make_variant("int8", given)


def test_a_converted_model_that_answers_differently_is_not_used(
    exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from falaj.optimization.runtime.conversion import from_torch

    real = from_torch.convert

    def wrong(*given: Any) -> Any:
        made = real(*given)
        return replace(made, references=[each + 0.25 for each in made.references])

    monkeypatch.setattr(from_torch, "convert", wrong)

    with pytest.raises(RecipeNotApplicable, match="predicts differently from the model"):
        make_variant("onnx", recipe_input("mlp", exports["mlp"]))


def test_pruning_of_what_it_does_not_know_is_refused(
    network_file: Path, rows: Learnable, exports: dict[str, Path]
) -> None:
    given = tree_input(network_file, replace(rows, holed=rows.features), "auc -0.1")

    with pytest.raises(RecipeNotApplicable, match=r"needs the torch export \(\.pt2\)"):
        make_variant("prune-structured", given)
    with pytest.raises(RecipeNotApplicable, match=r"needs the torch export \(\.pt2\)"):
        make_variant("prune-unstructured", given)


def test_litert_is_refused_where_it_is_not_installed(
    exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litert, "find_spec", lambda name: None)

    with pytest.raises(RecipeNotApplicable, match=r"not installed: litert_torch .*--environment"):
        make_variant("litert", recipe_input("mlp", exports["mlp"]))


# ------------------------------------------------------------------------------------------------------- GPU


class FakeGpu:
    """Runs what is meant for a GPU on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu, "device_name", lambda: "H200")
        monkeypatch.setattr(gpu, "DEVICE", "cpu")


@pytest.mark.parametrize("recipe", ["fp16", "bf16"])
def test_half_precision_is_for_the_gpu_where_there_is_one(
    recipe: Any, exports: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeGpu(monkeypatch)
    given = recipe_input("mlp", exports["mlp"])

    made = make_variant(recipe, given)

    path = tmp_path / "half.pt2"
    path.write_bytes(made.content)
    opened = gpu.open_half(recipe, path)
    assert (made.suffix, made.device, opened.device) == (".pt2", "gpu", "gpu")
    assert len(made.content) < 0.75 * exports["mlp"].stat().st_size
    rows = given.rows.features[:100]
    assert np.abs(opened.predict(rows) - given.original.predict(rows)).max() < 0.05


def test_half_precision_is_refused_without_a_gpu(exports: dict[str, Path]) -> None:
    given = recipe_input("mlp", exports["mlp"])

    with pytest.raises(RecipeNotApplicable, match="this CPU has no half-precision arithmetic"):
        make_variant("fp16", given)
    with pytest.raises(RecipeNotApplicable, match="no bfloat16 kernels for CPUs"):
        make_variant("bf16", given)


def test_a_cpu_with_half_precision_gets_a_graph_of_it(exports: dict[str, Path]) -> None:
    given = replace(recipe_input("mlp", exports["mlp"]), extensions=("asimd", "asimdhp"))

    made = make_variant("fp16", given)

    halves = [each for each in onnx.load_from_string(made.content).graph.initializer if each.data_type == 10]
    assert halves
    assert agreement(given, made.content) > 0.95


def test_an_onnx_model_on_the_gpu_needs_the_cuda_provider(exports: dict[str, Path]) -> None:
    given = recipe_input("mlp", exports["mlp"])
    original: Candidate = onnx_candidate("original", given.onnx)

    with pytest.raises(gpu.NotOnGpu, match="no CUDA provider"):
        gpu.open_on_gpu(original)


def test_a_quantizer_that_fails_is_a_reason(
    exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **more: Any) -> None:
        raise RuntimeError("axis out of range")

    monkeypatch.setattr("onnxruntime.quantization.quantize_static", broken)

    with pytest.raises(RecipeNotApplicable, match="the quantizer failed: RuntimeError: axis out of range"):
        quantization.quantize_statically(recipe_input("mlp", exports["mlp"]))
