"""GPUs that tasks cannot use once a cluster is full: our placement against published policies, on the trace openb.

As in the paper of the trace (1,213 nodes, 6,212 GPUs, 8,152 tasks), tasks are drawn with replacement until the requests
reach 130 % of all GPUs; none ends, and a task that fits nowhere is rejected. All policies get the same tasks.

`fragmented`, as in the paper: free GPUs less what a task of the trace could use of them, on average over tasks. `dead`:
free GPUs that no task of the trace can use. `allocated`: the share of all GPUs that was allocated.

Ours is `LeastFragmentation`, also used by the queue. "Through the queue" submits the same tasks as jobs of one queue, a
batch per round of `decide`. The peers are our implementations; the goal against best-fit was set beforehand and must
hold on the worst seed, the others only state which way is better. Figures are means over seeds not used during
development.

The trace is at the first argument, FALAJ_OPENB, or ../shared/data/openb.
"""

from __future__ import annotations

import csv
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import placement_policies
from falaj.records.scheduling.snapshot import (
    WHOLE_GPU,
    Demand,
    Gpu,
    Node,
    Queue,
    Request,
    Resources,
    RunningJob,
    Snapshot,
    Start,
)
from falaj.scheduling import decide
from falaj.scheduling.placement.fleet import Fleet, GpuAssignment, PlacementPolicy
from falaj.scheduling.placement.fragmentation import FragmentationMeasure
from falaj.scheduling.placement.least_fragmentation import LeastFragmentation
from harness import HERE, Result, Rule, report, say

QUICK = False
SEEDS = range(11, 16)
FULL = 1.3
A_ROUND = 500  # tasks per scheduling round
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
NODES, TASKS = "openb_node_list_gpu_node.csv", "openb_pod_list_default.csv"
MIB = 2**20

Workload = Mapping[Demand, int]
Make = Callable[[Fleet, Workload], PlacementPolicy]


class Filled(NamedTuple):
    """The cluster after one run, in GPUs; `allocated` in percent."""

    fragmented: float
    dead: float
    allocated: float
    decisions_per_s: float


def scored(score: placement_policies.Score) -> Make:
    return lambda fleet, _: placement_policies.LowestScore(fleet, score)


PEERS: dict[str, Make] = {
    "first-fit": lambda fleet, _: placement_policies.FirstFit(fleet),
    "best-fit": scored(placement_policies.best_fit),
    "best-fit by GPUs": scored(placement_policies.best_fit_by_gpus),
    "smallest dot product": scored(placement_policies.smallest_dot_product),
    "largest dot product": scored(placement_policies.largest_dot_product),
    "packing": scored(placement_policies.packing),
}


def main() -> None:
    folder = trace_folder()
    nodes, tasks = read_nodes(folder / NODES), read_tasks(folder / TASKS)
    ours = fill_often("falaj", LeastFragmentation, nodes, tasks)
    peers = {name: fill_often(name, make, nodes, tasks) for name, make in PEERS.items()}
    queued = show_runs("through the queue", [fill_through_queue(nodes, tasks, seed) for seed in SEEDS])
    report("placement", [*compare(ours, peers), *compare_queued(queued, ours, peers)])


def fill_often(name: str, make: Make, nodes: list[Node], tasks: list[Demand]) -> list[Filled]:
    return show_runs(name, [fill(make, nodes, tasks, seed) for seed in SEEDS])


def show_runs(name: str, runs: list[Filled]) -> list[Filled]:
    average = averages(runs)
    left = [f"{run.fragmented:.0f}" for run in runs]
    say(
        f"{name}: fragmented {average.fragmented:.1f} ({', '.join(left)}), dead {average.dead:.1f}, "
        f"allocated {average.allocated:.2f} %, {average.decisions_per_s:,.0f} decisions per CPU s"
    )
    return runs


def fill(make: Make, nodes: list[Node], tasks: list[Demand], seed: int) -> Filled:
    """Draw tasks until the cluster is full. Only the policy's choices are timed."""
    fleet, workload, draw = Fleet(nodes), Counter(tasks), random.Random(seed)
    there, requested, decisions = int(fleet.gpus.sum()), 0, 0
    began = time.process_time()
    policy = make(fleet, workload)
    while requested < FULL * there:
        demand = draw.choice(tasks)
        place = policy.choose(demand)
        if place:
            fleet.take(demand, place)
        requested += demand.gpus * demand.gpu_milli
        decisions += 1
    return measured(fleet, workload, decisions / (time.process_time() - began))


def measured(fleet: Fleet, workload: Workload, decisions_per_s: float) -> Filled:
    measure = FragmentationMeasure(fleet, workload)
    allocated = 100 * (1 - float(fleet.gpus.sum()) / float(fleet.all_gpus.sum()))
    return Filled(measure.fragmented_gpus(), measure.dead_gpus(), allocated, decisions_per_s)


# --------------------------------------------------------------------------------------- through the queue


def fill_through_queue(nodes: list[Node], tasks: list[Demand], seed: int) -> Filled:
    """Schedule the tasks of `fill` in the same order. Only `decide` is timed."""
    drawn = draw_until_full(nodes, tasks, seed)
    fleet, running, spent = Fleet(nodes), list[RunningJob](), 0.0
    machines = tuple([in_thousandths(node) for node in nodes])
    for begin in range(0, len(drawn), A_ROUND):
        requests = {
            request.job: request
            for request in (request_of(place, drawn[place]) for place in positions(begin, drawn))
        }
        snapshot = Snapshot.model_construct(
            now=NOON,
            nodes=machines,
            queues=(Queue(name="default"),),
            pending=tuple(requests.values()),
            running=tuple(running),
        )
        began = time.process_time()
        decisions = decide(snapshot)
        spent += time.process_time() - began
        for start in (each for each in decisions if isinstance(each, Start)):
            request = requests[start.job]
            running.append(RunningJob(request=request, placements=start.placements, started_at=NOON))
            take(fleet, drawn[int(start.job)], start)
    return measured(fleet, Counter(tasks), len(drawn) / spent)


def draw_until_full(nodes: list[Node], tasks: list[Demand], seed: int) -> list[Demand]:
    draw, drawn, requested = random.Random(seed), list[Demand](), 0
    there = sum(len(node.gpus) for node in nodes) * WHOLE_GPU
    while requested < FULL * there:
        drawn.append(draw.choice(tasks))
        requested += drawn[-1].gpus * drawn[-1].gpu_milli
    return drawn


def positions(begin: int, drawn: list[Demand]) -> range:
    return range(begin, min(begin + A_ROUND, len(drawn)))


def in_thousandths(node: Node) -> Node:
    return node.model_copy(update={"cpus": node.cpus * 1000, "shares": True})


def request_of(place: int, demand: Demand) -> Request:
    each = Resources(
        cpus=max(demand.cpus_milli, 1),
        gpus=demand.gpus,
        memory_bytes=demand.memory_bytes,
        gpu_milli=demand.gpu_milli,
        gpu_models=demand.gpu_models,
    )
    submitted = NOON - timedelta(days=1) + timedelta(seconds=place)
    return Request(job=str(place), each=each, submitted_at=submitted)


def take(fleet: Fleet, demand: Demand, start: Start) -> None:
    """Allocate in the fleet, which raises if it does not fit: this also checks the scheduler."""
    (where,) = start.placements
    index = next(place for place, node in enumerate(fleet.nodes) if node.name == where.node)
    gpus = [gpu.id for gpu in fleet.nodes[index].gpus]
    fleet.take(demand, GpuAssignment(index, tuple([gpus.index(gpu) for gpu in where.gpus])))


def compare_queued(queued: list[Filled], ours: list[Filled], peers: dict[str, list[Filled]]) -> list[Result]:
    through, alone = averages(queued), averages(ours)
    return [
        *(
            Result(
                f"GPUs fragmented, {name}, through the queue",
                through.fragmented,
                averages(peers[name]).fragmented,
                goal_against(name),
            )
            for name in filter(is_best_fit, peers)
        ),
        Result("GPUs fragmented, through the queue beside alone", through.fragmented, alone.fragmented, 1.1),
        Result(
            "GPUs allocated, %, through the queue beside alone",
            through.allocated,
            alone.allocated,
            0.99,
            Rule.RATIO_AT_LEAST,
        ),
    ]


# -------------------------------------------------------------------------------------------- comparison


def compare(ours: list[Filled], peers: dict[str, list[Filled]]) -> list[Result]:
    us, them = averages(ours), {name: averages(runs) for name, runs in peers.items()}
    results = []
    for name, peer in them.items():
        results.append(Result(f"GPUs fragmented, {name}", us.fragmented, peer.fragmented, goal_against(name)))
    for name in filter(is_best_fit, them):
        pairs = [(our.fragmented, peer.fragmented) for our, peer in zip(ours, peers[name], strict=True)]
        our, their = max(pairs, key=lambda pair: pair[0] / pair[1])
        results.append(Result(f"GPUs fragmented, {name}, worst seed", our, their, goal_against(name)))
    for name, peer in them.items():
        results.append(Result(f"GPUs dead, {name}", us.dead, peer.dead, goal_against(name)))
    for name, peer in them.items():
        what = f"GPUs allocated, %, {name}"
        results.append(Result(what, us.allocated, peer.allocated, 1, Rule.RATIO_AT_LEAST))
    speed, peer_speed = us.decisions_per_s, them["best-fit"].decisions_per_s
    what = "decisions per CPU s, best-fit"
    return [*results, Result(what, speed, peer_speed, 2000, Rule.FALAJ_AT_LEAST)]


def is_best_fit(name: str) -> bool:
    return name.startswith("best-fit")


def goal_against(name: str) -> float:
    return 0.9 if is_best_fit(name) else 1


def averages(runs: list[Filled]) -> Filled:
    return Filled(*(mean(figures) for figures in zip(*runs, strict=True)))


# ---------------------------------------------------------------------------------------------- reading


def trace_folder() -> Path:
    beside = HERE.parent.parent / "shared" / "data" / "openb"
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FALAJ_OPENB") or beside)
    missing = [name for name in (NODES, TASKS) if not (folder / name).is_file()]
    if missing:
        say(
            f"the openb trace is not there\n  given    {folder}\n  missing  {', '.join(missing)}\n"
            "  fix      name the folder that holds them: FALAJ_OPENB=<folder>, or the first argument"
        )
        raise SystemExit(2)
    return folder


def read_nodes(path: Path) -> list[Node]:
    with path.open(newline="") as rows:
        return [read_node(row) for row in csv.DictReader(rows)]


def read_node(row: dict[str, str]) -> Node:
    name, model = row["sn"], row["model"]
    gpus = [Gpu(id=f"{name}-gpu-{i}", model=model, memory_bytes=0) for i in range(int(row["gpu"]))]
    return Node(
        name=name,
        zone="openb",
        jurisdiction="CN",
        cpus=int(row["cpu_milli"]) // 1000,
        memory_bytes=int(row["memory_mib"]) * MIB,
        gpus=tuple(gpus),
    )


def read_tasks(path: Path) -> list[Demand]:
    with path.open(newline="") as rows:
        return [read_task(row) for row in csv.DictReader(rows)]


def read_task(row: dict[str, str]) -> Demand:
    models = frozenset(filter(None, row["gpu_spec"].split("|"))) or None
    return Demand(
        cpus_milli=int(row["cpu_milli"]),
        memory_bytes=int(row["memory_mib"]) * MIB,
        gpus=int(row["num_gpu"]),
        gpu_milli=int(row["gpu_milli"]) or WHOLE_GPU,
        gpu_models=models,
    )


if __name__ == "__main__":
    main()
