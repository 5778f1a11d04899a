"""The discrete-event simulation: jobs arrive, start, end and are preempted on a virtual clock.

It is pure: no wall clock, no random numbers, no I/O; equal input gives equal results. The scheduler sees a snapshot, as
in production; only the simulation knows how long jobs last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from falaj.errors import InvalidInput
from falaj.records.scheduling.simulation import PastJob, SimulatedCluster, SimulationResult
from falaj.records.scheduling.snapshot import (
    Decision,
    Evict,
    Placement,
    Price,
    Reason,
    Request,
    RunningJob,
    Snapshot,
    Start,
    Wait,
)
from falaj.scheduling.capacity.resources import requested_amount
from falaj.scheduling.simulator.backlog_policy import BacklogPolicy
from falaj.scheduling.simulator.event_queue import (
    DecisionDue,
    Event,
    EventQueue,
    GraceEnd,
    JobArrival,
    JobEnd,
    NodeLoss,
    NodeReturn,
)
from falaj.scheduling.simulator.policies import PERMANENT_REASONS, Scheduler, SchedulingPolicy, SnapshotPolicy
from falaj.scheduling.simulator.simulated_job import SimulatedJob
from falaj.scheduling.simulator.summary import summarise
from falaj.scheduling.simulator.usage_meter import UsageMeter

Progress = Callable[[int, int], None]


def simulate(
    jobs: Sequence[PastJob],
    world: SimulatedCluster,
    *,
    scheduler: Scheduler | None = None,
    progress: Progress | None = None,
) -> SimulationResult:
    """Replay `jobs` in `world` until no event is left, with Falaj's scheduler or another one.

    `progress` is called with the number of ended jobs and of all jobs.
    """
    policy = BacklogPolicy() if scheduler is None else SnapshotPolicy(scheduler)
    return Simulation(jobs, world, policy, progress).run()


class Simulation:
    def __init__(
        self,
        jobs: Sequence[PastJob],
        world: SimulatedCluster,
        policy: SchedulingPolicy,
        progress: Progress | None,
    ) -> None:
        self.world, self.policy, self.progress = world, policy, progress
        self.cases = {case.request.job: case for case in map(SimulatedJob, in_time(jobs))}
        self.pending: dict[str, SimulatedJob] = {}
        self.running: dict[str, SimulatedJob] = {}
        self.nodes = world.nodes
        self.away: set[str] = set()
        self.models = {gpu.id: gpu.model for node in world.nodes for gpu in node.gpus}
        self.events = EventQueue(begin_of(jobs))
        self.meter = UsageMeter(world, self.events.now)
        self.decided_at: datetime | None = None
        self.decisions = 0
        self.ended = 0

    def run(self) -> SimulationResult:
        self._schedule_initial_events()
        while self.events:
            events = self.events.next()
            self.meter.advance(self.events.now)
            for event in events:
                self._handle(event)
            self._decide_when_due()
        return summarise(list(self.cases.values()), self.meter, self.decisions)

    def _schedule_initial_events(self) -> None:
        for case in self.cases.values():
            self.events.at(case.request.submitted_at, JobArrival(case))
        for outage in self.world.outages:
            self.events.at(max(outage.lost_at, self.events.now), NodeLoss(outage.node))
            if outage.back_at is not None:
                self.events.at(max(outage.back_at, self.events.now), NodeReturn(outage.node))

    # ------------------------------------------------------------------------------------------ events

    def _handle(self, event: Event) -> None:
        match event:
            case JobArrival(it):
                self._wait(it)
            case JobEnd(it, turn) if it.turn == turn:
                self._end(it)
            case GraceEnd(it, turn) if it.turn == turn:
                self._release(it)
                self._wait(it)
            case NodeLoss(node):
                self._lose_node(node)
            case NodeReturn(node):
                self._restore_node(node)

    def _end(self, case: SimulatedJob) -> None:
        case.finish(self.events.now)
        self._release(case)
        self.meter.end(self.events.now)
        self.ended += 1
        if self.progress:
            self.progress(self.ended, len(self.cases))

    def _wait(self, case: SimulatedJob) -> None:
        self.pending[case.request.job] = case
        self.policy.job_added(case.request)
        self.meter.waits(case)

    def _release(self, case: SimulatedJob) -> None:
        del self.running[case.request.job]
        self.meter.releases(case, case.release(self.events.now))

    def _lose_node(self, name: str) -> None:
        self.away.add(name)
        self._update_nodes()
        for case in list(self.running.values()):
            if case.running and any(place.node == name for place in case.running.placements):
                if not case.running.leaving:
                    case.stop(self.events.now, checkpoint_every=self.world.assume.checkpoint_every)
                case.turn += 1
                case.displaced += 1
                self._release(case)
                self._wait(case)

    def _restore_node(self, name: str) -> None:
        self.away.discard(name)
        self._update_nodes()

    def _update_nodes(self) -> None:
        self.nodes = tuple(node for node in self.world.nodes if node.name not in self.away)
        self.meter.has(self.nodes)

    # ----------------------------------------------------------------------------------------- decisions

    def _decide_when_due(self) -> None:
        now, every = self.events.now, self.world.assume.decide_every
        if not self.pending:
            return
        if self.decided_at is not None and self.decided_at > now:
            return  # a decision is scheduled already
        if self.decided_at is not None and self.decided_at < now < self.decided_at + every:
            self.decided_at += every
            self.events.at(self.decided_at, DecisionDue())
            return
        self.decided_at = now
        for decision in self.policy.decide(self._snapshot()):
            self.decisions += 1
            self._carry_out(decision)

    def _snapshot(self) -> Snapshot:
        """Return the snapshot without validation: its parts are valid and names are unique."""
        return Snapshot.model_construct(
            now=self.events.now,
            nodes=self.nodes,
            queues=self.meter.queues(),
            pending=(),
            running=tuple([case.running for case in self.running.values() if case.running]),
            budgets=self.meter.budgets(self.running.values()),
            price=self.world.price,
        )

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Start():
                self._start(self.pending.pop(decision.job), decision)
            case Evict():
                self._evict(self.running[decision.job], by=self.pending[decision.by])
            case Wait():
                self._keep_waiting(self.pending[decision.job], decision.reason)

    def _keep_waiting(self, case: SimulatedJob, reason: Reason) -> None:
        if (case.reason in PERMANENT_REASONS) != (reason in PERMANENT_REASONS):
            self.meter.hopes(case, reason not in PERMANENT_REASONS)
        case.reason = reason

    def _start(self, case: SimulatedJob, decision: Start) -> None:
        now = self.events.now
        self.policy.job_removed(case.request)
        self.meter.waits_no_more(case)
        request = case.request.model_copy(update={"claim": False}) if case.request.claim else case.request
        limit = request.time_limit
        running = RunningJob(
            request=request,
            placements=decision.placements,
            started_at=now,
            ends_by=None if limit is None else now + limit,
            borrows=decision.borrows,
        )
        price = price_an_hour(request, decision.placements, self.world.price, self.models)
        lasts = case.start(running, price)
        self.running[request.job] = case
        self.meter.holds(case)
        self.events.at(now + lasts, JobEnd(case, case.turn))

    def _evict(self, victim: SimulatedJob, *, by: SimulatedJob) -> None:
        if victim.running is None or victim.running.leaving:
            return
        assume = self.world.assume
        self._claim(by)
        victim.stop(self.events.now, checkpoint_every=assume.checkpoint_every)
        victim.evicted += 1
        victim.running = victim.running.model_copy(update={"leaving": True})
        self.events.at(self.events.now + assume.grace, GraceEnd(victim, victim.turn))

    def _claim(self, case: SimulatedJob) -> None:
        if not case.request.claim:
            self.policy.job_removed(case.request)
            case.request = case.request.model_copy(update={"claim": True})
            self.policy.job_added(case.request)


def price_an_hour(
    request: Request, placements: Sequence[Placement], price: Price, models: Mapping[str, str]
) -> float:
    """Return what the job costs per hour, at the mean price of its GPUs; `models` maps GPU ids to models."""
    held = requested_amount(request)
    each = [price.gpus.get(models[gpu], price.gpu) for place in placements for gpu in place.gpus]
    return held.cpus * price.cpu + (held.gpus * sum(each) / len(each) if each else 0.0)


def in_time(jobs: Iterable[PastJob]) -> list[PastJob]:
    return sorted(jobs, key=lambda job: (job.request.submitted_at, job.request.job))


def begin_of(jobs: Sequence[PastJob]) -> datetime:
    if not jobs:
        raise InvalidInput.at("jobs", given="none", allowed="at least one job to replay")
    names = Counter(job.request.job for job in jobs)
    name, times = names.most_common(1)[0]
    if times > 1:
        raise InvalidInput.at("jobs", given=name, allowed="each job once; this one occurs more than once")
    return min(job.request.submitted_at for job in jobs)
