"""Runs over several processes for tests; returns the common outcome of all processes of each run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from falaj.training.runtime.checkpointing.sample_ledger import expected_head
from falaj.training.runtime.data.batches import BatchPlan
from fork_server import run_script

SCRIPT = Path("parallel_fit.py")
SAMPLES, BATCH_SIZE, STEPS = 92, 16, 7
"""An epoch has six steps, the last of which is smaller; the seventh is in the next epoch."""


class Outcome(NamedTuple):
    losses: list[str]
    weights: str
    resumed_from: int
    best: str | None = None
    refused: str = ""

    @property
    def died(self) -> bool:
        return not self.losses and not self.refused

    @property
    def figures(self) -> list[float]:
        return [float.fromhex(each) for each in self.losses]

    @property
    def weight(self) -> float:
        return float.fromhex(self.weights)


def runs(folder: Path, *wanted: tuple[int, dict[str, Any]]) -> list[Outcome]:
    """Return the outcome of each run; all its processes must agree and have seen every sample."""
    requests = [(count, {"batch_size": BATCH_SIZE, "steps": STEPS} | options) for count, options in wanted]
    answers = run_script(SCRIPT.stem, requests, folder)
    return [outcome(reports, options) for reports, (_, options) in zip(answers, requests, strict=True)]


def outcome(reports: list[dict[str, Any] | None], options: dict[str, Any]) -> Outcome:
    first = reports[0]
    assert all(each == first for each in reports)
    if first is None:
        return Outcome([], "", 0)
    if "refused" in first:
        return Outcome([], "", 0, refused=first["refused"])
    if first["step"] == options["steps"]:
        plan = BatchPlan(options.get("samples", SAMPLES), options["batch_size"], seed=3)
        assert first["ledger"] == expected_head(plan, options["steps"])
    return Outcome(first["losses"], first["weights"], first["from"], first["best"])
