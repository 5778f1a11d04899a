"""Moves jobs to other nodes, or to more or fewer of them: the new request, and the preemption of a running job.

The spec of a running job changes at once, while its request stays what it holds until its attempt has ended. So a move
survives a kill of the controller at any moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from falaj.errors import Conflict, Fault, InvalidInput
from falaj.governance.operations.call import Call
from falaj.records.scheduling.snapshot import WHOLE_GPU, Node, Queue, Reason, Request, Snapshot
from falaj.records.training.jobs import Job, JobMove, JobSpec, JobState, RequestedResources
from falaj.training import store
from falaj.training.admission import NEVER, require_capable_node
from falaj.training.dependencies import Scheduler
from falaj.training.memory_check import require_memory
from falaj.training.queue import request_of
from falaj.training.store import JobRow


class MoveTarget(NamedTuple):
    """The target of a move: cpu, gpu or a pool, and the numbers of nodes, GPUs and CPUs. What is none stays."""

    to: str | None = None
    pool: str | None = None
    gpus: int | None = None
    cpus: int | None = None
    nodes: int | None = None


def move_job(
    call: Call, move: MoveTarget, nodes: Sequence[Node], queues: Sequence[Queue], scheduler: Scheduler
) -> None:
    """Record the new request of the job. The reconciler preempts a running job at its next tick."""
    row = store.lock_job(call.tx, call.target.id)
    state, spec = row.state, row.spec
    if state.ended or row.cancelling:
        how = f"has ended: {state}" if state.ended else "is being cancelled"
        raise Conflict(f"job {call.target.id} {how}; only one that waits or runs is moved")
    moved = moved_spec(spec, move, nodes)
    if requested_of(moved) == requested_of(spec):
        raise Conflict(f"job {call.target.id} asks for just that already: {describe_request(spec)}")
    wanted = request_of(call.target, moved, data_zones=row.request.data_zones)
    pools = moved.affinity.pools
    require_capable_node(moved, [node for node in nodes if not pools or node.pool in pools])
    require_memory(moved, nodes)
    _refuse_unfit(scheduler, wanted, nodes, queues)
    changes: dict[str, Any] = {"spec": moved.model_dump(mode="json")}
    if not row.has_attempt:
        changes |= {"request": _to_json(wanted), "claim": False}
    else:
        changes |= {"request": _to_json(row.request), "leaving": True}
    store.update_job(call.tx, call.target.id, **changes)
    store.record_queue_change(call.tx)


def finish_move(call: Call, row: JobRow, *, ended: bool) -> None:
    """After an attempt: queue a moved job with its new request, or restore the spec of one that has ended."""
    spec, held = row.spec, row.request
    if requested_of(restore_held(spec, held)) == requested_of(spec):  # not moved, or moved already
        return
    if ended:
        store.update_job(call.tx, call.target.id, spec=restore_held(spec, held).model_dump(mode="json"))
    else:
        wanted = request_of(call.target, spec, data_zones=held.data_zones)
        store.update_job(call.tx, call.target.id, request=_to_json(wanted))


def moved_record(call: Call, job: Job) -> JobMove:
    """Return the result of a move, with a sentence that describes it."""
    steps = [each.step for each in store.checkpoints_of(call.tx, job.id)]
    runs = job.state is JobState.RUNNING
    if steps:
        then = f"resumes from step {max(steps)}" + (" or later" if runs else "")
    else:
        then = (
            "resumes from the checkpoint that it saves, or starts over if it saves none" if runs else "starts"
        )
    begins = "it is asked to save a checkpoint and stop" if runs else "it is queued"
    words = f"{begins}, and {then} with {describe_request(job.spec)}"
    return JobMove(job=job, step=max(steps, default=None), words=words)


def moved_spec(spec: JobSpec, move: MoveTarget, nodes: Sequence[Node]) -> JobSpec:
    """Return `spec` after `move` on these nodes; it remembers what was requested first."""
    pools = {node.pool for node in nodes}
    faults = []
    if move == MoveTarget():
        faults.append(Fault(where="to", allowed="cpu, gpu or a pool; or a number of nodes, CPUs or GPUs"))
    if move.to not in ("cpu", "gpu", None, *pools):
        faults.append(Fault(where="to", given=move.to, allowed=f"cpu, gpu, or a pool: {_listed(pools)}"))
    if move.pool is not None and move.pool not in pools:
        faults.append(Fault(where="pool", given=move.pool, allowed=f"one of {_listed(pools)}"))
    if move.gpus is not None and (move.to == "cpu") != (move.gpus == 0) and move.to in ("cpu", "gpu"):
        allowed = "0, or none said" if move.to == "cpu" else "at least 1"
        faults.append(Fault(where="gpus", given=str(move.gpus), allowed=f"{allowed}, to move to {move.to}"))
    if faults:
        raise InvalidInput("the job cannot be moved there", faults=faults)
    first = spec.asked or requested_of(spec)
    found = {
        **_gpus(spec, first, _gpu_count(spec, first, move, nodes)),
        "cpus": move.cpus or spec.cpus,
        "nodes": move.nodes or spec.nodes,
        "affinity": spec.affinity.model_copy(update={"pools": _pools(spec, move, nodes)}),
    }
    moved = _changed(spec, found)
    return _changed(moved, {"asked": None if requested_of(moved) == first else first})


def requested_of(spec: JobSpec) -> RequestedResources:
    """Return those resources of `spec` that a move can change."""
    own = {name: getattr(spec, name) for name in RequestedResources.model_fields if name != "pools"}
    return RequestedResources(**own, pools=spec.affinity.pools)


def restore_held(spec: JobSpec, held: Request) -> JobSpec:
    """Return `spec` with the resources that it `held`: a move did not take effect."""
    each = held.each
    names = ("cpus", "gpus", "gpu_milli", "gpu_models", "gpu_profile")
    found = {name: getattr(each, name) for name in names} | {
        "affinity": held.affinity,
        "nodes": held.replicas,
    }
    before = _changed(spec, {**found, "gpu_memory_bytes": each.gpu_memory_bytes or None})
    first = spec.asked or requested_of(spec)
    return _changed(before, {"asked": None if requested_of(before) == first else first})


def describe_request(spec: JobSpec | RequestedResources) -> str:
    """Return a short description of the requested resources."""
    pools = spec.affinity.pools if isinstance(spec, JobSpec) else spec.pools
    cpus = f"{spec.cpus} CPU" + ("s" if spec.cpus > 1 else "")
    gpus = f"{spec.gpus} GPU" + ("s" if spec.gpus > 1 else "") if spec.gpus else "no GPU"
    gpus = gpus if spec.gpu_milli == WHOLE_GPU else f"{spec.gpu_milli / WHOLE_GPU:g} of a GPU"
    nodes = f"{spec.nodes} nodes of " if spec.nodes > 1 else ""
    return f"{nodes}{cpus}, {gpus}" + (f", in pool {' or '.join(sorted(pools))}" if pools else "")


def _gpu_count(spec: JobSpec, first: RequestedResources, move: MoveTarget, nodes: Sequence[Node]) -> int:
    if move.gpus is not None or move.to is None:
        return spec.gpus if move.gpus is None else move.gpus
    if move.to == "cpu":
        return 0
    if move.to == "gpu":
        return spec.gpus or first.gpus or spec.processes
    return spec.gpus if any(node.gpus for node in nodes if node.pool == move.to) else 0


def _gpus(spec: JobSpec, first: RequestedResources, count: int) -> dict[str, Any]:
    """Return the GPU fields for `count` GPUs of the kind that was requested last."""
    kind = spec if spec.gpus else first
    names = ("gpu_memory_bytes", "gpu_models", "gpu_profile")
    if not count or not kind.gpus:
        return {"gpus": count, "gpu_milli": WHOLE_GPU, **dict.fromkeys(names)}
    share = kind.gpu_milli if count == 1 else WHOLE_GPU
    return {"gpus": count, "gpu_milli": share, **{name: getattr(kind, name) for name in names}}


def _pools(spec: JobSpec, move: MoveTarget, nodes: Sequence[Node]) -> frozenset[str]:
    """Return the allowed pools: the given one, else those with or without GPUs."""
    every = {node.pool for node in nodes}
    if move.pool is not None:
        return frozenset({move.pool})
    if move.to is None:
        return spec.affinity.pools
    if move.to in every:
        return frozenset({move.to})
    with_gpus = {node.pool for node in nodes if node.gpus}
    if move.to == "gpu":
        return frozenset(spec.affinity.pools & with_gpus)
    return frozenset(spec.affinity.pools - with_gpus or every - with_gpus)


def _refuse_unfit(
    scheduler: Scheduler, wanted: Request, nodes: Sequence[Node], queues: Sequence[Queue]
) -> None:
    """Raise InvalidInput where the job could never start, also because of residency."""
    alone = Snapshot(now=wanted.submitted_at, nodes=tuple(nodes), queues=tuple(queues), pending=(wanted,))
    found = scheduler.explain(alone, wanted.job)
    if found.reason in NEVER | {Reason.RESIDENCY}:
        fault = Fault(where="to", allowed=found.words, fix="; or ".join(found.would_start) or None)
        raise InvalidInput("the job could never start there", faults=[fault])


def _to_json(request: Request) -> dict[str, Any]:
    return request.model_dump(mode="json", exclude_defaults=True)


def _changed(spec: JobSpec, values: dict[str, Any]) -> JobSpec:
    """Return `spec` with other values, validated as a whole; roles, for example, are for a number of nodes."""
    given = {name: getattr(spec, name) for name in JobSpec.model_fields} | values
    try:
        return JobSpec.model_validate(given)
    except ValidationError as error:
        faults = [
            Fault(where="spec", allowed=each["msg"].removeprefix("Value error, ")) for each in error.errors()
        ]
        raise InvalidInput("the job cannot be moved there", faults=faults) from None


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
