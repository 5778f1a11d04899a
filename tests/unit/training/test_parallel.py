"""A run over several processes gives the results of one process, and can be resumed by any number of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from parallel_runs import runs

pytestmark = pytest.mark.slow

STRATEGIES: dict[int, list[Any]] = {
    2: ["ddp", "fsdp", "tensor"],
    4: ["ddp", "fsdp", {"ddp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2}],
}


@pytest.mark.parametrize("processes", [2, 4])
def test_every_strategy_gives_the_losses_of_one_process(tmp_path: Path, processes: int) -> None:
    strategies = [(processes, {"parallel": strategy, "accumulate": 4}) for strategy in STRATEGIES[processes]]

    alone, *distributed = runs(tmp_path, (1, {"accumulate": 4}), *strategies)

    for found in distributed:
        assert found.figures == pytest.approx(alone.figures, rel=2e-5)
        assert float.fromhex(found.weights) == pytest.approx(float.fromhex(alone.weights), rel=1e-3)


def test_exact_runs_are_bitwise_equal_with_1_2_and_4_processes(tmp_path: Path) -> None:
    options = {"exact": True, "dropout": 0.3, "unused": True}

    found = runs(tmp_path, *((count, options) for count in (1, 2, 4)))

    assert found[0].losses == found[1].losses == found[2].losses
    assert len({each.weights for each in found}) == 1


def test_an_exact_run_is_killed_and_resumed_with_another_number_of_processes(tmp_path: Path) -> None:
    rng = random.Random(5)
    same = {"exact": True, "dropout": 0.3, "steps": 12}
    kept = same | {"run": str(tmp_path / "run"), "checkpoint_every": 2}
    deaths = [
        (count, kept | {"deadly": {str(rng.randrange(count)): rng.randint(1, 80 // count)}})
        for count in (2, 4)
    ]

    straight, *dead, last = runs(tmp_path, (1, same), *deaths, (1, kept))

    assert [each.died for each in dead] == [True, True]
    assert last.losses == straight.losses[last.resumed_from :]
    assert last.weights == straight.weights


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_run_resumes_exactly_with_the_same_number_of_processes(
    tmp_path: Path, parallel: str
) -> None:
    same = {"parallel": parallel, "dropout": 0.3, "checkpoint_every": 3}
    kept = same | {"run": str(tmp_path / "run")}

    straight, dead, again = runs(tmp_path, (2, same), (2, kept | {"deadly": {"1": 50}}), (2, kept))

    assert dead.died
    assert again.resumed_from > 0
    assert again.losses == straight.losses[again.resumed_from :]
    assert again.weights == straight.weights


def test_shards_are_resumed_by_another_number_of_processes(tmp_path: Path) -> None:
    kept = {"parallel": "fsdp", "run": str(tmp_path / "run"), "checkpoint_every": 2, "accumulate": 4}

    alone, _, _, last = runs(
        tmp_path, (1, {"accumulate": 4}), (2, kept | {"steps": 3}), (4, kept | {"steps": 5}), (1, kept)
    )

    assert last.resumed_from == 5
    assert last.figures == pytest.approx(alone.figures[5:], rel=2e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_layers_may_go_unused_in_some_steps_or_all(tmp_path: Path, parallel: str) -> None:
    """A parameter without a gradient is not updated, as in one process: weight decay would change it."""
    net = {"accumulate": 4, "unused": True}
    branches = {"accumulate": 2, "model": "branches", "lr": 0.01}
    spare = {"accumulate": 4, "model": "spare"}

    alone = runs(tmp_path, (1, net), (1, branches | {"a_step": 2}), (1, spare))
    together = [net, branches | {"a_step": 1}, spare]
    found = runs(tmp_path, *((2, options | {"parallel": parallel}) for options in together))

    for one, two in zip(alone, found, strict=True):
        assert two.figures == pytest.approx(one.figures, rel=2e-5)
        assert two.weight == pytest.approx(one.weight, rel=1e-5)


def test_ddp_replicas_may_use_different_layers(tmp_path: Path) -> None:
    options = {"accumulate": 16, "model": "branches"}
    exact = {"accumulate": 8, "model": "branches", "exact": True}

    one, two, cut, exactly, exactly_two = runs(
        tmp_path, (1, options), (2, options), (4, options), (1, exact), (2, exact)
    )

    assert two.figures == pytest.approx(one.figures, rel=2e-5)
    assert cut.figures == pytest.approx(one.figures, rel=2e-5)
    assert exactly.losses == exactly_two.losses
    assert exactly.weights == exactly_two.weights


def test_shards_of_different_layers_are_refused(tmp_path: Path) -> None:
    (found,) = runs(tmp_path, (2, {"accumulate": 16, "model": "branches", "parallel": "fsdp"}))

    assert "the processes did not use the same layers" in found.refused


def test_a_shared_parameter_stays_shared(tmp_path: Path) -> None:
    same = {"accumulate": 4, "model": "tied"}
    refused = same | {"parallel": "tensor", "tensor_plan": {"read": "column", "middle.0": "row"}}

    one, ddp, fsdp, tensor, exact, cut = runs(
        tmp_path,
        (1, same),
        *((2, same | {"parallel": strategy}) for strategy in ("ddp", "fsdp", "tensor")),
        (2, same | {"exact": True}),
        (2, refused),
    )

    for found in (ddp, fsdp, tensor, exact):
        assert found.figures == pytest.approx(one.figures, rel=2e-5)
        assert found.weight == pytest.approx(one.weight, rel=1e-5)
    assert "shares a parameter with another layer" in cut.refused


@pytest.mark.parametrize(("samples", "batch_size"), [(3, 3), (17, 16), (21, 16)])
def test_fewer_samples_than_processes_or_micro_batches(tmp_path: Path, samples: int, batch_size: int) -> None:
    few = {"samples": samples, "batch_size": batch_size, "steps": 3, "noise": 0.0, "model": "layers"}
    many = few | {"accumulate": min(8, batch_size)}
    strategies: list[Any] = [
        "ddp",
        "fsdp",
        "tensor",
        {"ddp": 2, "tensor": 2},
        "pipeline",
        {"fsdp": 2, "pipeline": 2},
    ]

    one, *found = runs(
        tmp_path,
        (1, many),
        *((2 if strategy == "tensor" else 4, many | {"parallel": strategy}) for strategy in strategies),
    )

    for strategy, each in zip(strategies, found, strict=True):
        assert each.figures == pytest.approx(one.figures, rel=2e-5), strategy


@pytest.mark.parametrize("samples", [17, 21])
def test_exact_runs_are_equal_where_micro_batches_are_empty(tmp_path: Path, samples: int) -> None:
    options = {"exact": True, "samples": samples, "steps": 3, "dropout": 0.3}

    found = runs(tmp_path, *((count, options) for count in (1, 2, 4)))

    assert found[0].losses == found[1].losses == found[2].losses
    assert len({each.weights for each in found}) == 1


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_running_statistics_and_scores_are_the_same_in_all_processes(tmp_path: Path, parallel: str) -> None:
    options = {
        "model": "normed",
        "evaluate": "data",
        "evaluate_every": 2,
        "patience": 1,
        "parallel": parallel,
    }

    (found,) = runs(tmp_path, (2, options))

    assert found.best is not None


def test_an_optimizer_over_sharded_tensors_is_refused(tmp_path: Path) -> None:
    made = {"optimizer": "made", "accumulate": 4}

    one, ddp, fsdp = runs(
        tmp_path, (1, made), (2, made | {"parallel": "ddp"}), (2, made | {"parallel": "fsdp"})
    )

    assert ddp.figures == pytest.approx(one.figures, rel=2e-5)
    assert "optimizer=lambda parameters" in fsdp.refused


@pytest.mark.parametrize("exact", [False, True])
def test_parameters_unfrozen_during_training_are_trained_by_all_processes(
    tmp_path: Path, exact: bool
) -> None:
    options = {"thaw": True, "exact": exact, "accumulate": 4}

    alone, distributed = runs(tmp_path, (1, options), (2, options))

    assert distributed.figures == pytest.approx(alone.figures, rel=2e-5)
    assert distributed.weight == pytest.approx(alone.weight, rel=1e-3)


def test_a_loss_of_another_type_than_the_parameters_is_added_exactly(tmp_path: Path) -> None:
    options = {"exact": True, "wide_loss": True}

    alone, distributed = runs(tmp_path, (1, options), (2, options))

    assert distributed == alone


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_buffers_that_forward_replaces_are_the_same_in_all_processes(tmp_path: Path, parallel: str) -> None:
    """`runs` compares all state of the processes; the means of their samples differ."""
    replacing, fleeting = ({"model": kind, "parallel": parallel} for kind in ("replacing", "fleeting"))

    new, in_place, refused = runs(
        tmp_path, (2, replacing), (2, fleeting), (2, replacing | {"model": "growing"})
    )

    assert new == in_place
    assert "other shapes in other processes, among mean, rows" in refused.refused


def test_a_non_persistent_buffer_is_restored_exactly(tmp_path: Path) -> None:
    same = {"parallel": "ddp", "model": "fleeting", "checkpoint_every": 3}
    kept = same | {"run": str(tmp_path / "run")}

    straight, _, again = runs(tmp_path, (2, same), (2, kept | {"steps": 3}), (2, kept))

    assert again.resumed_from == 3
    assert again.losses == straight.losses[3:]
    assert again.weights == straight.weights


def test_an_exact_run_refuses_buffers_that_depend_on_the_sample_split(tmp_path: Path) -> None:
    kinds = ("replacing", "fleeting")

    found = runs(tmp_path, *((count, {"exact": True, "model": kind}) for kind in kinds for count in (1, 2)))

    for each in found:
        assert (
            "this cannot be trained exactly\nmean\n  given    a buffer that forward changes" in each.refused
        )
