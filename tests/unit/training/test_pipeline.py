"""A pipeline gives the losses, scores and model of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel_runs import runs

pytestmark = pytest.mark.slow

COMPOSED: list[Any] = ["pipeline", {"ddp": 2, "pipeline": 2}, {"fsdp": 2, "pipeline": 2}]


def test_two_stages_give_exactly_the_losses_of_one_process(tmp_path: Path) -> None:
    """Gradients are summed in the same order; only the norm is not, so there is no clipping here."""
    options = {"accumulate": 6, "dropout": 0.3, "clip": None, "evaluate": "data", "evaluate_every": 3}
    blocks, layers = options | {"model": "blocks", "unused": True}, options | {"model": "layers"}
    apart = {"parallel": "pipeline"}

    found = runs(
        tmp_path, *((1, each) for each in (blocks, layers)), *((2, each | apart) for each in (blocks, layers))
    )

    assert found[2:] == found[:2]


@pytest.mark.parametrize("model", ["layers", "blocks"])
def test_pipelines_with_ddp_and_fsdp_give_the_losses_of_one_process(tmp_path: Path, model: str) -> None:
    """Six steps make an epoch, whose last batch is smaller: its micro-batches have another shape."""
    options = {"model": model, "dropout": 0.3, "accumulate": 8, "clip": 0.5}

    alone, *distributed = runs(
        tmp_path, (1, options), *((4, options | {"parallel": strategy}) for strategy in COMPOSED)
    )

    for strategy, found in zip(COMPOSED, distributed, strict=True):
        assert found.figures == pytest.approx(alone.figures, rel=2e-5), strategy
        assert found.weight == pytest.approx(alone.weight, rel=1e-5), strategy


def test_pipelines_with_tensor_parallelism_give_the_losses_of_one_process(tmp_path: Path) -> None:
    options = {"model": "layers", "accumulate": 4, "clip": 0.5}

    alone, found = runs(tmp_path, (1, options), (4, options | {"parallel": {"tensor": 2, "pipeline": 2}}))

    assert found.figures == pytest.approx(alone.figures, rel=2e-5)
    assert found.weight == pytest.approx(alone.weight, rel=1e-5)


def test_gradients_are_clipped_by_their_norm_over_all_stages(tmp_path: Path) -> None:
    options = {"model": "blocks", "accumulate": 4, "clip": 0.1, "optimizer": "sgd", "lr": 0.5}
    apart = options | {"parallel": "pipeline"}

    alone, clipped, unclipped = runs(tmp_path, (1, options), (2, apart), (2, apart | {"clip": 10.0**9}))

    assert clipped.figures == pytest.approx(alone.figures, rel=2e-5)
    assert clipped.weight == pytest.approx(alone.weight, rel=1e-5)
    assert unclipped.figures != pytest.approx(alone.figures, rel=1e-2)


def test_stages_compute_in_16_bits_as_one_process_does(tmp_path: Path) -> None:
    options = {"model": "blocks", "accumulate": 4, "precision": "bf16"}
    apart = options | {"parallel": "pipeline"}

    alone, found, refused = runs(tmp_path, (1, options), (2, apart), (2, apart | {"precision": "fp16"}))

    assert found.figures == pytest.approx(alone.figures, rel=2e-5)
    assert "fp32, tf32 or bf16, with a pipeline" in refused.refused


def test_a_function_scores_the_whole_model(tmp_path: Path) -> None:
    options = {"model": "layers", "accumulate": 4, "evaluate": "function", "evaluate_every": 3}
    strategies = [(2, "pipeline"), (4, {"fsdp": 2, "pipeline": 2})]

    alone, *found = runs(
        tmp_path, (1, options), *((n, options | {"parallel": strategy}) for n, strategy in strategies)
    )

    for each in found:
        assert float.fromhex(each.best or "nan") == pytest.approx(
            float.fromhex(alone.best or "nan"), rel=1e-4
        )
        assert each.figures == pytest.approx(alone.figures, rel=2e-5)


def test_a_run_resumes_across_pipeline_ddp_sharded_pipeline_and_one_process(tmp_path: Path) -> None:
    options = {"model": "blocks", "accumulate": 4, "dropout": 0.3}
    kept = options | {"run": str(tmp_path / "run"), "checkpoint_every": 2}

    alone, _, _, _, last = runs(
        tmp_path,
        (1, options),
        (2, kept | {"parallel": "pipeline", "steps": 2}),
        (2, kept | {"parallel": "ddp", "steps": 4}),
        (4, kept | {"parallel": {"fsdp": 2, "pipeline": 2}, "steps": 6}),
        (1, kept),
    )

    assert last.resumed_from == 6
    assert last.figures == pytest.approx(alone.figures[6:], rel=2e-5)
    assert last.weight == pytest.approx(alone.weight, rel=1e-5)


def test_a_killed_pipeline_resumes_exactly(tmp_path: Path) -> None:
    same = {"parallel": "pipeline", "model": "blocks", "accumulate": 4, "dropout": 0.3, "checkpoint_every": 3}
    kept = same | {"run": str(tmp_path / "run")}

    straight, dead, again = runs(tmp_path, (2, same), (2, kept | {"deadly": {"1": 100}}), (2, kept))

    assert dead.died
    assert again.resumed_from > 0
    assert again.losses == straight.losses[again.resumed_from :]
    assert again.weights == straight.weights


def test_non_persistent_buffers_equal_those_of_one_process_also_after_a_resume(
    tmp_path: Path,
) -> None:
    options = {"model": "centred", "accumulate": 4, "clip": None}
    apart = options | {"parallel": "pipeline", "run": str(tmp_path / "run")}

    alone, _, last = runs(tmp_path, (1, options), (2, apart | {"steps": 3}), (2, apart))

    assert last.resumed_from == 3
    assert last.losses == alone.losses[3:]
    assert last.weights == alone.weights


def test_a_pipeline_saves_before_it_stops(tmp_path: Path) -> None:
    kept = {"parallel": "pipeline", "model": "blocks", "accumulate": 4, "run": str(tmp_path / "run")}

    stopped, again = runs(tmp_path, (2, kept | {"stop": True, "checkpoint_every": 1000}), (2, kept))

    assert stopped.died  # the exit code of SIGTERM, after the run was saved
    assert again.resumed_from >= 4


def test_a_loss_that_is_not_finite_stops_all_stages(tmp_path: Path) -> None:
    (found,) = runs(tmp_path, (2, {"parallel": "pipeline", "model": "blocks", "accumulate": 4, "bad": 5}))

    assert "the loss is nan at step 2" in found.refused


def test_unsupported_options_of_a_pipeline_are_refused_by_all_processes(tmp_path: Path) -> None:
    tied, cuts, made = runs(
        tmp_path,
        (2, {"parallel": "pipeline", "model": "tied"}),
        (2, {"parallel": "pipeline", "model": "layers", "pipeline_cuts": ["7"]}),
        (2, {"parallel": "pipeline", "model": "layers", "optimizer": "made"}),
    )

    assert "read.weight, which is used in more than one stage" in tied.refused
    assert "pipeline_cuts" in cuts.refused
    assert "a name, or a function from parameters" in made.refused
