"""Waits and fairness among teams, against first come first served, EASY backfill and fixed quotas.

Nodes and task shapes are from the public trace openb (every 120th node, and the tasks that fit there). Since the trace
has no teams and a nearly idle cluster, the rest is a random model: five teams, one of which (`greedy`) requests three
times its share; campaigns of 1 to 24 equal jobs with a total of 95 % of all GPU-hours; run times of 20 minutes in the
median; limits of 1.2 to 4 times that; 10 % not preemptible, and 15 % of whole-GPU tasks as gangs.

A quota is a team's share by weight. Falaj's teams may borrow the whole cluster and give it back within a minute, from a
checkpoint; history halves in 12 hours. The peers are our implementations on the same simulator.

Figures are means over seeds. `jain` is Jain's index over held / entitled while a team waited (1: all alike);
`deviation` is the largest average shortfall of a team, as a share of the cluster. Goals only state which way is better.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from statistics import mean
from typing import NamedTuple

from batch_schedulers import easy_backfill, first_come_first_served
from falaj.records.names import ObjectId
from falaj.records.scheduling.simulation import Assumptions, PastJob, SimulatedCluster, SimulationResult
from falaj.records.scheduling.snapshot import WHOLE_GPU, Demand, Node, Queue, Quota, Request, Resources
from falaj.scheduling.simulator import Scheduler, simulate
from harness import Result, Rule, report, say
from placement import NODES, TASKS, read_nodes, read_tasks, trace_folder

QUICK = True
SEEDS = (21, 22, 23)
JOBS = 1000
EVERY = 120
LOAD = 0.95
BEGIN = datetime(2026, 1, 5, tzinfo=UTC)
HOUR = timedelta(hours=1)
WEIGHTS = {"churn": 1.0, "fraud": 1.0, "risk": 1.0, "greedy": 1.0, "research": 2.0}
ASKS = {"greedy": 3.0}
MODEST = frozenset(WEIGHTS) - frozenset(ASKS)
LIMITS = [timedelta(minutes=minutes) for minutes in (15, 30, 60, 120, 240, 480, 960)]
ASSUME = Assumptions(grace=timedelta(minutes=1), half_life=12 * HOUR)


class Figures(NamedTuple):
    """Waits in minutes."""

    mean_wait: float
    p95_wait: float
    modest_wait: float
    slowdown: float
    gpu_use: float
    jain: float
    deviation: float
    preemptions: float
    unfinished: float


def main() -> None:
    folder = trace_folder()
    nodes = [node.model_copy(update={"shares": True}) for node in read_nodes(folder / NODES)[::EVERY]]
    tasks = [task for task in read_tasks(folder / TASKS) if fits_somewhere(task, nodes)]
    say(
        f"{len(nodes)} nodes, {count_gpus(nodes)} GPUs; teams, arrivals, durations and gangs are drawn at random"
    )
    ours = replays("falaj", None, nodes, tasks)
    peers = {
        "first come first served": replays("first come first served", first_come_first_served, nodes, tasks),
        "EASY backfill": replays("EASY backfill", easy_backfill, nodes, tasks),
        "fixed quotas": replays("fixed quotas", None, nodes, tasks, borrowing=False),
    }
    report("fairness", [result for name, peer in peers.items() for result in compare(ours, name, peer)])


def replays(
    name: str,
    scheduler: Scheduler | None,
    nodes: Sequence[Node],
    tasks: Sequence[Demand],
    *,
    borrowing: bool = True,
) -> Figures:
    began = time.process_time()
    world = SimulatedCluster(nodes=tuple(nodes), queues=teams(nodes, borrowing=borrowing), assume=ASSUME)
    found = [figures(simulate(draw(seed, nodes, tasks), world, scheduler=scheduler)) for seed in SEEDS]
    average = Figures(*(mean(column) for column in zip(*found, strict=True)))
    say(
        f"{name}: waits {average.mean_wait:.0f} min on average, {average.p95_wait:.0f} at p95, modest teams "
        f"{average.modest_wait:.0f}; slowdown {average.slowdown:.1f}; GPU use {average.gpu_use:.1%}; "
        f"Jain {average.jain:.3f}; deviation {average.deviation:.3f}; {average.preemptions:.0f} preemptions; "
        f"{average.unfinished:.0f} unfinished; {time.process_time() - began:.1f} CPU s"
    )
    return average


def figures(found: SimulationResult) -> Figures:
    waits = [job.wait for job in found.jobs if job.wait is not None and job.queue in MODEST]
    minute = timedelta(minutes=1)
    return Figures(
        mean_wait=found.total.wait.mean / minute,
        p95_wait=found.total.wait.p95 / minute,
        modest_wait=mean(wait / minute for wait in waits),
        slowdown=found.total.slowdown,
        gpu_use=found.total.gpu_use,
        jain=found.fairness.jain,
        deviation=found.fairness.largest_deviation,
        preemptions=found.total.preemptions,
        unfinished=found.total.jobs - found.total.ended,
    )


def compare(ours: Figures, name: str, peer: Figures) -> list[Result]:
    most = Rule.RATIO_AT_LEAST
    return [
        Result(f"mean wait, min, {name}", ours.mean_wait, peer.mean_wait, 1),
        Result(f"p95 wait, min, {name}", ours.p95_wait, peer.p95_wait, 1),
        Result(f"mean wait of modest teams, min, {name}", ours.modest_wait, peer.modest_wait, 1),
        Result(f"bounded slowdown, {name}", ours.slowdown, peer.slowdown, 1),
        Result(f"GPU use, %, {name}", 100 * ours.gpu_use, 100 * peer.gpu_use, 1, most),
        Result(f"Jain's index, {name}", ours.jain, peer.jain, 1, most),
        Result(f"largest deviation from the entitled share, {name}", ours.deviation, peer.deviation, 1),
    ]


# ------------------------------------------------------------------------------------------------ the model


def teams(nodes: Sequence[Node], *, borrowing: bool) -> tuple[Queue, ...]:
    there, weights = count_gpus(nodes), sum(WEIGHTS.values())
    most = Quota(gpus=there) if borrowing else None
    return tuple(
        Queue(name=name, quota=Quota(gpus=math.floor(there * weight / weights)), limit=most, weight=weight)
        for name, weight in WEIGHTS.items()
    )


def draw(seed: int, nodes: Sequence[Node], tasks: Sequence[Demand]) -> list[PastJob]:
    """Return the jobs of one seed, the same for every scheduler."""
    chance = random.Random(seed)
    shares, largest = asked_shares(), smallest_quota(nodes)
    campaigns: list[tuple[str, list[tuple[Resources, int, timedelta]]]] = []
    work = dict.fromkeys(WEIGHTS, 0.0)
    drawn = 0
    while drawn < JOBS:
        team = min(
            work, key=lambda name: work[name] / shares[name]
        )  # so that each requests its share of the work
        campaign = draw_campaign(chance, tasks, largest)
        drawn += len(campaign)
        work[team] += sum(work_of(*job) for job in campaign) + 1e-6
        campaigns.append((team, campaign))
    span = sum(work.values()) / (count_gpus(nodes) * LOAD)
    jobs: list[PastJob] = []
    for team, campaign in campaigns:
        comes = BEGIN + chance.uniform(0, span) * HOUR
        jobs += [
            past_job(chance, f"job-{len(jobs) + i:05}", team, comes, *job) for i, job in enumerate(campaign)
        ]
    return jobs


def asked_shares() -> dict[str, float]:
    """Return the share of all work that each team submits."""
    weights = sum(WEIGHTS.values())
    shares = {team: times * WEIGHTS[team] / weights for team, times in ASKS.items()}
    left, rest = 1 - sum(shares.values()), sum(WEIGHTS[team] for team in MODEST)
    return shares | {team: left * WEIGHTS[team] / rest for team in MODEST}


def draw_campaign(
    chance: random.Random, tasks: Sequence[Demand], largest: int
) -> list[tuple[Resources, int, timedelta]]:
    each = resources(chance.choice(tasks))
    whole = each.gpus and each.gpu_milli == WHOLE_GPU
    replicas = chance.randint(2, 4) if whole and chance.random() < 0.15 else 1
    replicas = min(replicas, max(largest // max(each.gpus, 1), 1))
    count = min(1 + math.floor(math.log(1 - chance.random()) / math.log(1 - 1 / 6)), 24)
    return [(each, replicas, length(chance)) for _ in range(count)]


def length(chance: random.Random) -> timedelta:
    minutes = chance.lognormvariate(math.log(20), 1.2)
    return timedelta(seconds=round(60 * min(max(minutes, 1.0), 240.0)))


def past_job(
    chance: random.Random,
    name: str,
    team: str,
    comes: datetime,
    each: Resources,
    replicas: int,
    lasts: timedelta,
) -> PastJob:
    factor = chance.uniform(1.2, 4)
    request = Request(
        job=ObjectId(name),
        queue=team,
        replicas=replicas,
        each=each,
        submitted_at=comes,
        time_limit=next(limit for limit in LIMITS if limit >= factor * lasts),
        preemptible=chance.random() >= 0.1,
    )
    return PastJob(request=request, duration=lasts)


def resources(task: Demand) -> Resources:
    """Return the resources with whole CPUs, since the scheduler does not share CPUs."""
    return Resources(
        cpus=max(math.ceil(task.cpus_milli / 1000), 1),
        gpus=task.gpus,
        memory_bytes=task.memory_bytes,
        gpu_milli=task.gpu_milli if task.gpus == 1 else WHOLE_GPU,
        gpu_models=task.gpu_models if task.gpus else None,
    )


def work_of(each: Resources, replicas: int, lasts: timedelta) -> float:
    """Return GPU-hours."""
    return each.gpus * each.gpu_milli / WHOLE_GPU * replicas * (lasts / HOUR)


def fits_somewhere(task: Demand, nodes: Sequence[Node]) -> bool:
    needed = resources(task)
    return needed.gpus <= smallest_quota(nodes) and any(
        node.cpus >= needed.cpus
        and node.memory_bytes >= needed.memory_bytes
        and sum(needed.gpu_models is None or gpu.model in needed.gpu_models for gpu in node.gpus)
        >= needed.gpus
        for node in nodes
    )


def smallest_quota(nodes: Sequence[Node]) -> int:
    """Return the smallest quota, which no job may exceed, so that all can run under fixed quotas."""
    return math.floor(count_gpus(nodes) * min(WEIGHTS.values()) / sum(WEIGHTS.values()))


def count_gpus(nodes: Sequence[Node]) -> int:
    return sum(len(node.gpus) for node in nodes)


if __name__ == "__main__":
    main()
