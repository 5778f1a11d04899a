"""A fault in one of several processes is handled by all of them: they continue alike or end, and none hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from falaj.training.runtime.checkpointing.sample_ledger import expected_head
from falaj.training.runtime.data.batches import BatchPlan
from fork_server import run_script

pytestmark = pytest.mark.slow

PLAN = BatchPlan(40, 8, seed=3)


def runs(folder: Path, *requests: tuple[int, dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the outcome of each process of each run."""
    found: list[list[dict[str, Any]]] = run_script("parallel_faults", requests, folder)
    assert all(each is not None for run in found for each in run), "a process hung or broke: see above"
    return found


def test_a_loss_that_is_not_finite_stops_all_processes_with_the_same_message(tmp_path: Path) -> None:
    bad = int(PLAN.indices(4)[0])  # of the first process
    kept = {"run": str(tmp_path / "run"), "checkpoint_every": 2}

    spoilt, again, alone = runs(tmp_path, (2, {**kept, "bad": bad}), (2, kept), (1, {}))

    assert [each["error"] for each in spoilt] == ["LossNotFinite", "LossNotFinite"]
    assert spoilt[0] == spoilt[1]
    assert "the loss is nan at step 4; the last good checkpoint: of step 2" in spoilt[0]["words"]
    assert [each["from"] for each in again] == [2, 2]
    assert again[0]["losses"] == pytest.approx(alone[0]["losses"][2:], rel=1e-5)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_out_of_memory_in_one_process_reduces_the_micro_batches_of_all(tmp_path: Path, rank: str) -> None:
    kept = {"run": str(tmp_path / "run"), "dropout": 0.3}

    alone, short, buffered, backward, straight, begun, went_on = runs(
        tmp_path,
        (1, {}),
        (2, {"most": {rank: 3}}),
        (2, {"most": {rank: 3}, "buffered": True}),
        (2, {"most": {rank: 3}, "backward": True}),
        (2, {"most": {rank: 3}, "dropout": 0.3}),
        (2, {**kept, "most": {rank: 3}, "steps": 6}),
        (2, kept),
    )

    for each in (*short, *buffered, *backward):
        assert each["losses"] == pytest.approx(alone[0]["losses"], rel=1e-5)
    assert {each["ledger"] for each in short} == {expected_head(PLAN, 10)}
    words = f"step 3: out of memory in process {rank} (CUDA out of memory. Tried to allocate 2.00 GiB); continuing with"
    assert words in short[int(rank)]["output"]
    assert "with 4 micro-batches per global batch" in short[int(rank)]["output"]
    # all continue with the same micro-batches, although the others have enough memory
    assert [each["from"] for each in went_on] == [6, 6]
    assert begun[0]["losses"] + went_on[0]["losses"] == straight[0]["losses"]


@pytest.mark.parametrize("changes", [{"parallel": "fsdp"}, {"exact": True, "batch_size": 16}], ids=str)
def test_out_of_memory_that_one_process_cannot_recover_is_an_error_with_a_fix(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    ((first, second),) = runs(tmp_path, (2, {"most": {"1": 1}, **changes}))

    assert second["error"] == "OutOfMemory"
    assert "accumulate=" in second["words"]
    noticed = "RuntimeError" if "exact" in changes else "TrainingError"
    assert first["error"] in (noticed, "OutOfMemory")  # it did not wait forever


def test_fewer_samples_than_processes_are_trained_on_as_by_one(tmp_path: Path) -> None:
    few = {"samples": 1, "batch_size": 1}

    alone, distributed, refused = runs(tmp_path, (1, few), (2, few), (2, {"samples": 1, "batch_size": 2}))

    assert [each["losses"] for each in distributed] == [pytest.approx(alone[0]["losses"], rel=1e-5)] * 2
    assert [each["error"] for each in refused] == ["InvalidTraining"] * 2
    assert "at most 1 samples" in refused[0]["words"]


def test_another_number_of_processes_resumes_with_a_notice_but_not_with_another_seed(tmp_path: Path) -> None:
    kept = {"run": str(tmp_path / "run")}

    alone, _, fewer, other = runs(
        tmp_path, (1, {}), (2, {**kept, "steps": 5}), (1, kept), (2, {**kept, "seed": 4})
    )

    assert fewer[0]["from"] == 5
    assert fewer[0]["losses"] == pytest.approx(alone[0]["losses"][5:], rel=1e-5)
    assert "processes is one process, was ddp 2" in fewer[0]["output"]
    assert [each["error"] for each in other] == ["CheckpointMismatch"] * 2


def test_a_callback_in_one_process_ends_all_after_the_same_step(tmp_path: Path) -> None:
    (both,) = runs(tmp_path, (2, {"stops": {"1": 4}}))

    assert [(each["stopped"], each["step"]) for each in both] == [("asked", 5)] * 2


def test_a_different_number_of_gathered_blocks_is_reported(tmp_path: Path) -> None:
    """torch's timeout, half an hour by default, ends them; it is short here."""
    ((first, second),) = runs(tmp_path, (2, {"parallel": "fsdp", "skips": {"0": 0, "1": 2}}))

    assert [first["error"], second["error"]] == ["TrainingError", "TrainingError"]
    assert "did they not use the same layers?" in first["words"]
    assert "in process 0" in first["words"]
    assert "fsdp, 1 blocks gathered in this step, the last one blocks.2, in process 1" in second["words"]
    assert 'parallel="ddp"' in second["words"]


def test_processes_with_different_options_are_refused_by_all(tmp_path: Path) -> None:
    """Each would choose its own samples, and its ledger would still add up."""
    different = {"seed": 9, "samples": 32, "lr": 0.5, "batch_size": 16, "steps": 11, "accumulate": 2}

    found = runs(tmp_path, *((2, {"own": {"1": {name: value}}}) for name, value in different.items()))

    for (leader, other), name in zip(found, different, strict=True):
        assert leader["error"] == other["error"] == "InvalidTraining", name
        assert (
            "the arguments of process 1 differ from those of process 0; see its own error" in leader["words"]
        )
        assert name in other["words"]
        assert "in process 1" in other["words"]
