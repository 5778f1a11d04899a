"""A backlog that is kept between rounds gives the decisions of a fresh snapshot."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from falaj.records.scheduling.snapshot import Decision, Evict, Snapshot, Start
from falaj.scheduling import Backlog, decide, decide_from
from workloads import apply_decisions, competing_teams, for_any, job, stop_leaving_jobs, worlds


def deeds(decisions: tuple[Decision, ...]) -> list[Decision]:
    return [decision for decision in decisions if isinstance(decision, Start | Evict)]


@pytest.mark.slow
@for_any(worlds() | competing_teams(), st.data())
def test_decisions_from_a_kept_backlog_equal_those_from_a_fresh_snapshot(
    snapshot: Snapshot, data: st.DataObject
) -> None:
    backlog = Backlog(snapshot.pending)
    for _ in range(4):
        decided = decide(snapshot)
        assert deeds(decide_from(backlog, snapshot.model_copy(update={"pending": ()}))) == deeds(decided)

        after = apply_decisions(snapshot, decided)
        if data.draw(st.booleans()):
            after = stop_leaving_jobs(after)
        ended = data.draw(
            st.sets(st.sampled_from([each.request.job for each in after.running]))
            if after.running
            else st.just(set())
        )
        left = tuple(each for each in after.running if each.request.job not in ended)
        after = after.model_copy(update={"running": left})
        follow(backlog, snapshot, after)
        snapshot = after
        assert sorted(request.job for request in backlog) == sorted(each.job for each in snapshot.pending)


def follow(backlog: Backlog, before: Snapshot, after: Snapshot) -> None:
    """Update the backlog from one snapshot to the next."""
    was, now = ({request.job: request for request in each.pending} for each in (before, after))
    for name, request in was.items():
        if now.get(name) != request:
            backlog.remove(request)
    for name, request in now.items():
        if was.get(name) != request:
            backlog.add(request)


def test_only_a_present_job_can_be_removed() -> None:
    backlog = Backlog([job("a"), job("b")])

    backlog.remove(job("a"))

    assert [request.job for request in backlog] == ["b"]
    assert len(backlog) == 1
    with pytest.raises(KeyError):
        backlog.remove(job("a"))
