"""Admission checks: a job is refused if it could not run on these nodes and in its queue even if they were idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from falaj.errors import Conflict, Fault, InvalidInput
from falaj.ports.metadata import Transaction
from falaj.records.scheduling.snapshot import WHOLE_GPU, Node, Queue, Reason, Request, Snapshot
from falaj.records.sizes import format_size, spell_size
from falaj.records.training.jobs import JobSpec
from falaj.training import store
from falaj.training.dependencies import Scheduler
from falaj.training.memory_check import gpu_matches, require_memory

NEVER = frozenset({Reason.TOPOLOGY, Reason.TOO_LARGE, Reason.NO_QUEUE})
"""Reasons that never go away. Residency is checked elsewhere, and budgets are replenished."""


def require_admissible(
    scheduler: Scheduler,
    spec: JobSpec,
    request: Request,
    nodes: Sequence[Node],
    queues: Sequence[Queue],
    *,
    can_grow: bool = False,
) -> None:
    """Raise InvalidInput if the job could never run: for its resources, its memory estimate or its queue.

    Where the nodes `can_grow`, there may be as many of each kind as the job has replicas.
    """
    require_capable_node(spec, nodes)
    require_memory(spec, nodes)
    more = nodes_to_come(nodes, request.replicas) if can_grow and request.replicas > 1 else []
    require_startable(scheduler, request, [*nodes, *more], queues)


def nodes_to_come(nodes: Sequence[Node], count: int) -> list[Node]:
    """Return so many more nodes of each kind that there is, as an autoscaler might add."""
    kinds: dict[tuple[object, ...], Node] = {}
    for node in nodes:
        kind = node.cluster, node.pool, node.zone, node.cpus, node.memory_bytes, len(node.gpus), node.labels
        kinds.setdefault(kind, node)
    return [
        node.model_copy(update={"name": f"to-come-{kind}-{number}", "cordoned": False, "others": None})
        for kind, node in enumerate(kinds.values())
        for number in range(count)
    ]


def require_capable_node(spec: JobSpec, nodes: Sequence[Node]) -> None:
    """Raise InvalidInput, with the numbers, if no node could run the job even if it were idle."""
    kinds = [*_of_nodes(spec, nodes), *_of_gpus(spec, nodes)]
    if faults := [*kinds, *_of_amounts(spec, nodes, without_gpus=bool(kinds))]:
        raise InvalidInput("no machine here can ever run this job", faults=faults)


def require_startable(
    scheduler: Scheduler, request: Request, nodes: Sequence[Node], queues: Sequence[Queue]
) -> None:
    """Raise InvalidInput if the scheduler would never start the job on an idle cluster."""
    alone = Snapshot(now=request.submitted_at, nodes=tuple(nodes), queues=tuple(queues), pending=(request,))
    found = scheduler.explain(alone, request.job)
    if found.reason in NEVER:
        words = "; or ".join(found.would_start)
        raise InvalidInput(
            "this job could never start",
            faults=[Fault(where=f"spec in queue {request.queue}", allowed=found.words, fix=words or None)],
        )


def require_job_limit(tx: Transaction, workspace: str, *, limit: int) -> None:
    """Raise Conflict if a workspace has reached its limit of unfinished jobs."""
    if store.has_unfinished(tx, workspace, at_least=limit):
        raise Conflict(
            f"this workspace has {limit} jobs that wait or run, the most that it may have; cancel some, wait, or "
            "have jobs.unfinished_limit in falaj.toml raised"
        )


def _of_nodes(spec: JobSpec, nodes: Sequence[Node]) -> Iterator[Fault]:
    """Yield faults for pools and labels that no node has."""
    pools, labels = {node.pool for node in nodes}, {each for node in nodes for each in node.labels}
    if spec.affinity.pools and not spec.affinity.pools & pools:
        yield _fault("affinity.pools", _listed(spec.affinity.pools), f"one of {_listed(pools)}")
    for label in sorted(spec.affinity.labels - labels):
        yield _fault("affinity.labels", label, f"labels of nodes: {_listed(labels)}")


def _of_gpus(spec: JobSpec, nodes: Sequence[Node]) -> Iterator[Fault]:
    """Yield faults for kinds of GPUs that no node has."""
    if not spec.gpus:
        return
    every = [gpu for node in nodes for gpu in node.gpus]
    profiles = {gpu.profile for gpu in every if gpu.profile}
    if spec.gpu_profile and spec.gpu_profile not in profiles:
        yield _fault(
            "gpu_profile", spec.gpu_profile, f"a profile that cards are cut by here: {_listed(profiles)}"
        )
    models = {gpu.model for gpu in every}
    if spec.gpu_models and not spec.gpu_models & models:
        yield _fault("gpu_models", _listed(spec.gpu_models), f"models that are here: {_listed(models)}")
    if spec.gpu_milli < WHOLE_GPU and not any(node.shares and node.gpus for node in nodes):
        yield _fault("gpu_milli", str(spec.gpu_milli), "whole GPUs (1000): no node here shares its GPUs")
    most = max((gpu.memory_bytes for gpu in every), default=0)
    if (spec.gpu_memory_bytes or 0) > most:
        yield _fault("gpu_memory_bytes", str(spec.gpu_memory_bytes), f"at most {most} on one GPU here")


def _of_amounts(spec: JobSpec, nodes: Sequence[Node], *, without_gpus: bool) -> Iterator[Fault]:
    memory = max((node.memory_bytes for node in nodes), default=0)
    cards = max((sum(gpu_matches(spec, gpu) for gpu in node.gpus) for node in nodes), default=0)
    limits = [
        ("gpus", 0 if without_gpus else spec.gpus, cards),
        ("cpus", spec.cpus, max((node.cpus for node in nodes), default=0)),
        ("memory_bytes", spec.memory_bytes or 0, memory),
    ]
    for what, requested, most in limits:
        if requested > most:
            in_bytes = what == "memory_bytes"
            given, there = (spell_size(requested), format_size(most)) if in_bytes else (requested, most)
            fix = f"ask for {'less' if most else 'none'}; falaj nodes list shows the machines"
            yield _fault(what, str(given), f"at most {there} on one machine here", fix=fix)


def _fault(what: str, given: str, allowed: str, *, fix: str | None = None) -> Fault:
    return Fault(where=f"spec.{what}", given=given, allowed=allowed, fix=fix)


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
