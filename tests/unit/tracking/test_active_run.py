"""`with platform.run(…) as run`: what is logged, and how the run ends."""

from __future__ import annotations

import pytest

from falaj.errors import Conflict, InvalidInput
from platforms import OwnPlatform


def test_a_run_is_logged_to_and_finished(platform: OwnPlatform) -> None:
    with platform.run("churn", name="first", params={"lr": 0.1}) as run:
        run.log(auc=0.8, loss=0.5)
        run.log(step=1, auc=0.9)
        run.params(depth=3)
        run.tags(team="risk")
        run.artifact("plots/roc.png", b"png")

    found = platform.runs.show(run.id)
    assert (found.run.name, found.run.status) == ("first", "finished")
    assert {each.key: (each.last, each.points) for each in found.metrics} == {
        "auc": (0.9, 2),
        "loss": (0.5, 1),
    }
    assert {each.key: each.value for each in found.params} == {"lr": "0.1", "depth": "3"}
    assert [each.path for each in found.artifacts] == ["plots/roc.png"]
    assert platform.get(found.artifacts[0].blob) == b"png"
    assert "finished" in repr(run)


@pytest.mark.parametrize(("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "killed")])
def test_a_run_that_raises_is_marked(platform: OwnPlatform, error: type[BaseException], status: str) -> None:
    with pytest.raises(error), platform.run("churn") as run:
        raise error

    assert platform.runs.show(run.id).run.status == status


def test_a_run_that_was_ended_inside_its_block_stays_as_it_is(platform: OwnPlatform) -> None:
    with platform.run("churn") as run:
        run.end(status="killed")

    assert platform.runs.show(run.id).run.status == "killed"
    with pytest.raises(Conflict, match="has ended"):
        run.log(auc=1.0)


def test_what_cannot_be_logged_is_refused(platform: OwnPlatform) -> None:
    with pytest.raises(InvalidInput), platform.run("churn") as run:
        run.params(**{"a" * 300: 1})
    with pytest.raises(InvalidInput):
        platform.run("Bad Name!")
