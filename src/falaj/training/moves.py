"""Moves a job to other machines: what it asks for there, and what it is told to do to get there.

The spec of a running job changes at once, while its request stays what it holds until it has left: so whoever is killed
in between leaves enough for the next one to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from falaj.errors import Conflict, Fault, InvalidInput
from falaj.governance.operations.call import Call
from falaj.records.scheduling.snapshot import WHOLE_GPU, Node, Queue, Reason, Request, Snapshot
from falaj.records.training.jobs import Job, JobMove, JobSpec, JobState, RequestedResources
from falaj.training import store
from falaj.training.admission import NEVER, require_capable_node
from falaj.training.dependencies import Scheduler
from falaj.training.memory_check import require_memory
from falaj.training.queue import request_for


class MoveTarget(NamedTuple):
    """Where to: cpu, gpu, or a pool; with how many GPUs and CPUs, where that is said."""

    to: str
    pool: str | None = None
    gpus: int | None = None
    cpus: int | None = None


def move_job(
    call: Call, move: MoveTarget, nodes: Sequence[Node], queues: Sequence[Queue], scheduler: Scheduler
) -> None:
    """Write down where the job goes. One that runs is told to save itself and leave, at the keeper's next look."""
    row = store.lock_job(call.tx, call.target.id)
    state, spec = JobState(row["state"]), JobSpec.model_validate(row["spec"])
    if state.ended or row["cancelling"]:
        how = f"has ended: {state}" if state.ended else "is being cancelled"
        raise Conflict(f"job {call.target.id} {how}; only one that waits or runs is moved")
    moved = moved_spec(spec, move, nodes)
    if requested_of(moved) == requested_of(spec):
        raise Conflict(f"job {call.target.id} asks for just that already: {describe_request(spec)}")
    wanted = _request(call, moved)
    pools = moved.affinity.pools
    require_capable_node(moved, [node for node in nodes if not pools or node.pool in pools])
    require_memory(moved, nodes)
    _refuse_unfit(scheduler, wanted, nodes, queues)
    changes: dict[str, Any] = {"spec": moved.model_dump(mode="json")}
    if state is JobState.QUEUED:
        changes |= {"request": _kept(wanted), "claim": False}
    else:
        changes |= {"request": row["request"] or _kept(_request(call, spec)), "leaving": True}
    store.update_job(call.tx, call.target.id, **changes)
    store.record_queue_change(call.tx)


def finish_move(call: Call, row: Any, *, ended: bool) -> None:
    """An attempt at a job that may have been moved is over: it waits for what it wants now, or ended as it was."""
    if row["request"] is None:
        return
    spec, held = JobSpec.model_validate(row["spec"]), Request.model_validate(row["request"])
    if requested_of(restore_held(spec, held)) == requested_of(
        spec
    ):  # it was not moved, or holds what it was moved to
        return
    if ended:
        store.update_job(call.tx, call.target.id, spec=restore_held(spec, held).model_dump(mode="json"))
    else:
        store.update_job(call.tx, call.target.id, request=_kept(_request(call, spec)))


def moved_record(call: Call, job: Job) -> JobMove:
    """What came of a move, in words too."""
    steps = [each.step for each in store.checkpoints_of(call.tx, job.id)]
    runs = job.state is JobState.RUNNING
    if steps:
        then = f"goes on from step {max(steps)}" + (" or later" if runs else "")
    else:
        then = "goes on from what it saves then, or begins anew if that is nothing" if runs else "begins"
    begins = "it is asked to save itself and leave" if runs else "it waits"
    words = f"{begins}, and {then} with {describe_request(job.spec)}"
    return JobMove(job=job, step=max(steps, default=None), words=words)


def moved_spec(spec: JobSpec, move: MoveTarget, nodes: Sequence[Node]) -> JobSpec:
    """`spec` as it is after `move`, given the machines there are; it remembers what was asked for first."""
    pools = {node.pool for node in nodes}
    faults = []
    if move.to not in ("cpu", "gpu", *pools):
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
        "affinity": spec.affinity.model_copy(update={"pools": _pools(spec, move, nodes)}),
    }
    moved = _changed(spec, found)
    return _changed(moved, {"asked": None if requested_of(moved) == first else first})


def requested_of(spec: JobSpec) -> RequestedResources:
    """What `spec` asks for, of what a move can change."""
    own = {name: getattr(spec, name) for name in RequestedResources.model_fields if name != "pools"}
    return RequestedResources(**own, pools=spec.affinity.pools)


def restore_held(spec: JobSpec, held: Request) -> JobSpec:
    """`spec` with what was `held`, instead of what it should have had after a move that never came about."""
    each = held.each
    names = ("cpus", "gpus", "gpu_milli", "gpu_models", "gpu_profile")
    found = {name: getattr(each, name) for name in names} | {"affinity": held.affinity}
    before = _changed(spec, {**found, "gpu_memory_bytes": each.gpu_memory_bytes or None})
    first = spec.asked or requested_of(spec)
    return _changed(before, {"asked": None if requested_of(before) == first else first})


def describe_request(spec: JobSpec | RequestedResources) -> str:
    """What is asked for, in few words."""
    pools = spec.affinity.pools if isinstance(spec, JobSpec) else spec.pools
    cpus = f"{spec.cpus} CPU" + ("s" if spec.cpus > 1 else "")
    gpus = f"{spec.gpus} GPU" + ("s" if spec.gpus > 1 else "") if spec.gpus else "no GPU"
    gpus = gpus if spec.gpu_milli == WHOLE_GPU else f"{spec.gpu_milli / WHOLE_GPU:g} of a GPU"
    return f"{cpus}, {gpus}" + (f", in pool {' or '.join(sorted(pools))}" if pools else "")


def _gpu_count(spec: JobSpec, first: RequestedResources, move: MoveTarget, nodes: Sequence[Node]) -> int:
    if move.gpus is not None:
        return move.gpus
    if move.to == "cpu":
        return 0
    if move.to == "gpu":
        return spec.gpus or first.gpus or spec.processes
    return spec.gpus if any(node.gpus for node in nodes if node.pool == move.to) else 0


def _gpus(spec: JobSpec, first: RequestedResources, count: int) -> dict[str, Any]:
    """So many GPUs, of the kind that was asked for last."""
    kind = spec if spec.gpus else first
    names = ("gpu_memory_bytes", "gpu_models", "gpu_profile")
    if not count or not kind.gpus:
        return {"gpus": count, "gpu_milli": WHOLE_GPU, **dict.fromkeys(names)}
    share = kind.gpu_milli if count == 1 else WHOLE_GPU
    return {"gpus": count, "gpu_milli": share, **{name: getattr(kind, name) for name in names}}


def _pools(spec: JobSpec, move: MoveTarget, nodes: Sequence[Node]) -> frozenset[str]:
    """The pools that it may run in: the one that was said, or, by its kind, those without or with GPUs."""
    every = {node.pool for node in nodes}
    if move.pool is not None or move.to in every:
        return frozenset({move.pool or move.to})
    with_gpus = {node.pool for node in nodes if node.gpus}
    if move.to == "gpu":
        return frozenset(spec.affinity.pools & with_gpus)
    return frozenset(spec.affinity.pools - with_gpus or every - with_gpus)


def _refuse_unfit(
    scheduler: Scheduler, wanted: Request, nodes: Sequence[Node], queues: Sequence[Queue]
) -> None:
    """As for a new job; and where the data may not go is refused here too, for it was not asked before."""
    alone = Snapshot(now=wanted.submitted_at, nodes=tuple(nodes), queues=tuple(queues), pending=(wanted,))
    found = scheduler.explain(alone, wanted.job)
    if found.reason in NEVER | {Reason.RESIDENCY}:
        fault = Fault(where="to", allowed=found.words, fix="; or ".join(found.would_start) or None)
        raise InvalidInput("the job could never start there", faults=[fault])


def _request(call: Call, spec: JobSpec) -> Request:
    target = call.target
    return request_for(
        target.id, spec, workspace=target.workspace, submitted_at=target.created_at, label=target.label
    )


def _kept(request: Request) -> dict[str, Any]:
    return request.model_dump(mode="json", exclude_defaults=True)


def _changed(spec: JobSpec, values: dict[str, Any]) -> JobSpec:
    """`spec` with other values, checked as a whole."""
    given = {name: getattr(spec, name) for name in JobSpec.model_fields} | values
    return JobSpec.model_validate(given)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
