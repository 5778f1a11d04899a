"""How a canary is going: its evidence after each observation, computed anew from what is stored."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select

from falaj.control.pipelines.verdict import CanaryJudge, reference_bounds
from falaj.control.tables import work
from falaj.errors import NotFound
from falaj.ports.metadata import Transaction
from falaj.records.control.pipelines import Canary, CanaryPoint, CanaryProgress, CanaryVerdict, Pipeline
from falaj.records.control.workflows import WorkflowState
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.serving.endpoints import DeployedEndpoint
from falaj.records.serving.statistics import VersionStats
from falaj.serving.store import endpoint_record, observations_after, stats

CANARY, RETRAIN = "pipelines.canary", "pipelines.retrain"
REFERENCE = timedelta(days=1)
"""The champion's latency and errors of this time before the canary give the bounds of slow requests and of scores."""
READ = 1000
MOST_POINTS = 400
"""Points that are kept of a canary; beyond them every other one is dropped."""
MOST_CANARIES = 32
SEARCHED = 500
"""Workflows that are searched for the last canary of an endpoint."""


@dataclass(frozen=True)
class _Requested:
    """A canary that was requested: its workflow, its plan, and how it ended, if it did."""

    work: ObjectId
    state: WorkflowState
    plan: Canary
    verdict: CanaryVerdict | None


@dataclass
class _Replay:
    """The judge of one canary, the observations that it has judged, and points of its evidence."""

    judge: CanaryJudge
    points: list[CanaryPoint] = field(default_factory=list)
    every: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_new(self, tx: Transaction, record: DeployedEndpoint) -> None:
        """Judge the observations that came since."""
        while found := observations_after(tx, record.id, self.judge.last, limit=READ):
            for seen in found:
                self.judge.add(seen, record.scoring)
                if seen.number % self.every == 0:
                    self.points.append(self.judge.point(seen.at))
            if len(self.points) > MOST_POINTS:
                self.points, self.every = self.points[1::2], self.every * 2
            if len(found) < READ:
                return


class CanaryReplays:
    """Canaries of endpoints, judged as their workflows judge them. Each observation is judged once by this process."""

    def __init__(self) -> None:
        self._replays: OrderedDict[tuple[str, datetime, Canary], _Replay] = OrderedDict()
        self._lock = threading.Lock()

    def progress(self, tx: Transaction, endpoint: StoredObject, home: str) -> CanaryProgress:
        """Return the evidence so far where versions answer side by side, and the verdict on the last canary that ended.

        Where no canary is under way, versions that share the requests are compared by the default plan.
        """
        record = endpoint_record(tx, endpoint)
        requested = _requested(tx, endpoint, home)
        running = next((each for each in requested if not each.state.ended), None)
        ended = next((each.verdict for each in requested if each.verdict is not None), None)
        names = _versions(record)
        if names is None:
            if ended is None:
                raise NotFound(f"endpoint {record.name} has one version that answers, and had no canary")
            return CanaryProgress(endpoint=record.name, ended=ended)
        share = next(route.weight for route in record.routes if route.version == names[1])
        plan = running.plan if running else Canary(share=min(max(share, 1), 50))
        replay = self._replay(tx, record, plan, names)
        with replay.lock:
            replay.add_new(tx, record)
            judge = replay.judge
            current = judge.verdict(*(VersionStats(version=name) for name in names))
            return CanaryProgress(
                endpoint=record.name,
                work=None if running is None or running.work is None else ObjectId(running.work),
                plan=plan,
                champion=names[0],
                challenger=names[1],
                since=record.changed_at,
                outcome=current.outcome,
                words=judge.progress(),
                evidence=current.evidence,
                points=(*replay.points, *_newest(replay)),
                ended=ended,
            )

    def _replay(
        self, tx: Transaction, record: DeployedEndpoint, plan: Canary, names: tuple[str, str]
    ) -> _Replay:
        key = (record.id, record.changed_at, plan)
        with self._lock:
            if key not in self._replays:
                self._replays[key] = _Replay(_judge(tx, record, plan, names))
            self._replays.move_to_end(key)
            while len(self._replays) > MOST_CANARIES:
                self._replays.popitem(last=False)
            return self._replays[key]


def _newest(replay: _Replay) -> Sequence[CanaryPoint]:
    judge = replay.judge
    last = replay.points[-1].number if replay.points else 0
    return [judge.point(judge.last_at)] if judge.last > last and judge.last_at is not None else []


def _versions(record: DeployedEndpoint) -> tuple[str, str] | None:
    """Return champion and challenger, by weight; none unless two versions answer."""
    answering = sorted((route for route in record.routes if route.weight), key=lambda route: -route.weight)
    return (answering[0].version, answering[1].version) if len(answering) == 2 else None


def _judge(tx: Transaction, record: DeployedEndpoint, plan: Canary, names: tuple[str, str]) -> CanaryJudge:
    since, until = record.changed_at - REFERENCE, record.changed_at
    before = {each.version: each for each in stats(tx, record.id, since=since, until=until)}
    slow_above_s, score_bound = reference_bounds(
        before.get(names[0], VersionStats(version=names[0])), record.scoring
    )
    return CanaryJudge(
        plan, champion=names[0], challenger=names[1], slow_above_s=slow_above_s, score_bound=score_bound
    )


def _requested(tx: Transaction, endpoint: StoredObject, home: str) -> list[_Requested]:
    """Return the canaries of an endpoint, newest first."""
    query = select(work.c.id, work.c.workflow, work.c.input, work.c.state, work.c.result)
    query = query.where(work.c.workflow.in_((CANARY, RETRAIN))).order_by(work.c.id.desc()).limit(SEARCHED)
    return [
        _Requested(row.id, WorkflowState(row.state), plan, _verdict(row.result))
        for row in tx.execute(query)
        if (plan := _plan_for(endpoint, home, row.workflow, row.input)) is not None
    ]


def _plan_for(endpoint: StoredObject, home: str, workflow: str, given: dict[str, Any]) -> Canary | None:
    """Return the plan of a workflow that is about this endpoint."""
    if workflow == CANARY:
        return Canary.model_validate(given["canary"]) if given["endpoint"] == endpoint.id else None
    pipeline = Pipeline.model_validate(given["pipeline"])
    return pipeline.canary if (given["workspace"], pipeline.endpoint) == (home, endpoint.name) else None


def _verdict(result: dict[str, Any] | None) -> CanaryVerdict | None:
    found = (result or {}).get("verdict")
    return None if found is None else CanaryVerdict.model_validate(found)
