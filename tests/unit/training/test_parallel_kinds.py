"""Frames, arrays, DataLoaders, dicts and models with a loss of their own over several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fork_server import run_script

KINDS = ["arrays", "pandas", "polars", "loader", "dict", "own loss", "function of the output"]


def runs(folder: Path, *wanted: tuple[int, dict[str, Any]]) -> list[dict[str, Any]]:
    answers: list[list[dict[str, Any]]] = run_script("parallel_kinds", wanted, folder)
    for reports in answers:
        assert all(each == reports[0] for each in reports)
    return [reports[0] for reports in answers]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "pipeline"])
def test_every_kind_trains_over_two_processes_as_in_one(parallel: str, tmp_path: Path) -> None:
    alone, *together = runs(
        tmp_path,
        (1, {"kind": "tensors", "evaluate": True}),
        *((2, {"kind": kind, "parallel": parallel, "evaluate": True}) for kind in KINDS),
    )

    for kind, found in zip(KINDS, together, strict=True):
        assert found.get("losses") == pytest.approx(alone["losses"], rel=1e-4), (kind, found)
        assert found["best"] == pytest.approx(alone["best"], rel=1e-4), kind


@pytest.mark.slow
def test_every_kind_is_exact_across_processes_and_a_resume(tmp_path: Path) -> None:
    exact = {"exact": True, "parallel": "ddp"}
    alone, *together = runs(
        tmp_path,
        (1, {"kind": "tensors", **exact}),
        *(
            run
            for kind in KINDS
            for run in (
                (2, {"kind": kind, "steps": 3, "run": str(tmp_path / kind), **exact}),
                (1, {"kind": kind, "run": str(tmp_path / kind), **exact}),
            )
        ),
    )

    for place, kind in enumerate(KINDS):
        first, then = together[2 * place : 2 * place + 2]
        assert first["losses"] + then["losses"] == alone["losses"], kind
        assert then["from"] == 3
