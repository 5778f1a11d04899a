"""Requests for nodes are taken back once `scale_up` is off: idle pods would keep nodes that cost money."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from falaj.control.scale_up import ScaleUp
from falaj.errors import Unavailable
from falaj.ports.cluster.placeholders import PlaceholderPods


class Recorded:
    """Notes what is asked for; refuses as often as it is told."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.asked: list[Sequence[PlaceholderPods]] = []

    def keep(self, wanted: Sequence[PlaceholderPods]) -> None:
        self.asked.append(wanted)
        if len(self.asked) <= self.refusals:
            raise Unavailable("the API server does not answer")


def switched_off(clusters: dict[str | None, Any]) -> ScaleUp:
    def unused(*_: Any) -> Any:
        raise AssertionError("neither nodes nor jobs matter while it is off")

    return ScaleUp(unused, unused, unused, clusters, limit=0)  # type: ignore[arg-type]


def test_what_was_asked_for_is_taken_back_once() -> None:
    cluster = Recorded()
    scale_up = switched_off({None: cluster})

    assert scale_up.is_due
    scale_up.step()

    assert cluster.asked == [[]]
    assert not scale_up.is_due


def test_a_cluster_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("falaj.control.scale_up.EVERY_S", 0.0)
    away, other = Recorded(refusals=1), Recorded()
    scale_up = switched_off({"away": away, "other": other})

    with pytest.raises(Unavailable):
        scale_up.step()
    assert scale_up.is_due
    scale_up.step()

    assert (len(away.asked), len(other.asked)) == (2, 2)
    assert not scale_up.is_due


def test_a_machine_without_clusters_has_nothing_to_ask() -> None:
    assert not switched_off({}).is_due
