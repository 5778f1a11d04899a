"""The table of trials on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from falaj.apps.cli.commands.tune import describe_params, screen_of
from falaj.records.tuning import StudyTrial, TrialState

if TYPE_CHECKING:
    from conftest import StudyEnv  # type: ignore[attr-defined]


def test_it_shows_progress_the_best_and_what_waits_in_the_queue(light_env: StudyEnv) -> None:
    params = {"x": 0.123456789, "n": 2, "kind": "a\x1b[31m"}
    best = StudyTrial(number=0, state=TrialState.COMPLETE, params=params, values=(0.93,))
    waiting = StudyTrial(number=2, params=params)
    counts = {TrialState.COMPLETE: 2, TrialState.PRUNED: 1, TrialState.QUEUED: 1}
    study = light_env.create().model_copy(update={"best": (best,), "counts": counts})

    screen = screen_of(study, (waiting, best))

    assert screen.head == [
        "study churn: maximize auc",
        "[###############...............] 3 of 6 trials; 1 wait in the queue",
        r"best trial 0: auc 0.93 with x=0.12346 n=2 kind=a\x1b[31m",
    ]
    assert screen.headings == ("trial", "state", "auc", "parameters", "reason")
    assert [row[:3] for row in screen.rows] == [["2", "queued", "-"], ["0", "complete", "0.93"]]


def test_parameters_are_one_line() -> None:
    assert describe_params({"lr": 1e-05, "bias": True, "layers": 3}) == "lr=1e-05 bias=true layers=3"
