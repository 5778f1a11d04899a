"""After `fit`, also a failed one, a model can be trained by hand or fitted again, and has no hooks left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fork_server import run_script

pytestmark = pytest.mark.slow

WAYS: list[Any] = ["ddp", "fsdp", "tensor", "pipeline"]


def outcomes(folder: Path, *requests: tuple[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the result of each run, which is equal in all its processes."""
    found = run_script(
        "after_fit", [(count, {"accumulate": 4} | options) for count, options in requests], folder
    )
    assert all(each == reports[0] for reports in found for each in reports), found
    return [reports[0] for reports in found]


def test_a_fitted_model_can_be_trained_by_hand_and_fitted_again(tmp_path: Path) -> None:
    both = {"fsdp": 2, "tensor": 2}

    alone, *spread, composed = outcomes(
        tmp_path,
        (1, {"parallel": "auto"}),
        *((2, {"parallel": way}) for way in WAYS),
        (4, {"parallel": both}),
    )

    for way, found in zip([*WAYS, both], [*spread, composed], strict=True):
        assert found["listeners"] == 0, way
        for part in ("first", "hand", "again"):
            assert found[part] == pytest.approx(alone[part], rel=2e-5), (way, part)


def test_a_model_whose_fit_failed_can_be_trained_by_hand_and_fitted_again(tmp_path: Path) -> None:
    bad = {"bad": 5}

    alone, ddp, fsdp, tensor, pipeline = outcomes(
        tmp_path, (1, {"parallel": "auto", **bad}), *((2, {"parallel": way, **bad}) for way in WAYS)
    )

    for found in (ddp, fsdp, tensor):
        assert "the loss is nan at step 2" in found["first"]
        assert found["listeners"] == 0
        for part in ("hand", "again"):
            assert found[part] == pytest.approx(alone[part], rel=2e-5)
    assert "on the meta device, without values" in pipeline["again"]


def test_a_sharded_model_cannot_change_its_parallel_layout(tmp_path: Path) -> None:
    shards, cut, exact = outcomes(
        tmp_path,
        (2, {"parallel": "fsdp", "then": "ddp"}),
        (2, {"parallel": "tensor", "then": "pipeline"}),
        (2, {"parallel": "fsdp", "then": "tensor"}),
    )

    assert "ddp 2, for a model that an earlier fit left as fsdp 2" in shards["again"]
    assert "pipeline 2, for a model that an earlier fit left as tensor 2" in cut["again"]
    assert "an earlier run has split this model differently" in exact["again"]
