"""Each strategy with two processes gives the losses of one process; the other cases are in the slow tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_runs import runs

STRATEGIES = ("ddp", "fsdp", "tensor", "pipeline")


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one_with_every_strategy(tmp_path: Path) -> None:
    options = {"model": "layers", "accumulate": 4, "steps": 3}

    alone, *found = runs(
        tmp_path, (1, options), *((2, options | {"parallel": strategy}) for strategy in STRATEGIES)
    )

    for strategy, each in zip(STRATEGIES, found, strict=True):
        assert each.figures == pytest.approx(alone.figures, rel=2e-5), strategy
        assert each.weight == pytest.approx(alone.weight, rel=1e-5), strategy
