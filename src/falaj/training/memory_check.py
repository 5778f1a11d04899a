"""Checks by the estimate that came with a job whether its training fits into the memory of a node."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.errors import Fault, InvalidInput
from falaj.records.scheduling.snapshot import WHOLE_GPU, Gpu, Node
from falaj.records.sizes import format_size
from falaj.records.training.jobs import JobMemoryEstimate, JobSpec, TrainingPlan

USABLE = 0.92
"""The rest is for the CUDA context or the interpreter and its libraries, and for fragmentation."""
DATA_SHARE = 0.25
"""Data that takes at most this share of a GPU is kept there with the model."""
GIB = 1 << 30


def require_memory(spec: JobSpec, nodes: Sequence[Node]) -> None:
    """Raise InvalidInput, with the sizes and the nearest option that fits, if no node that the job may run on has
    enough memory. After a move to another kind of device, the estimate for the first kind is used."""
    estimate, own = spec.estimate, [node for node in nodes if _may_run_on(spec, node)]
    if estimate is None or not own:
        return
    memory = process_memory(spec, own)
    asked = [way for way in estimate.ways if way.as_asked and way.processes <= spec.world_size]
    if not asked or any(_need(way, spec, memory) <= USABLE * memory for way in asked):
        return
    least = min(asked, key=lambda way: way.peak_bytes)
    given = f"{format_size(estimate.ways[0].peak_bytes)} {_each(spec)}, {_words(estimate.ways[0], spec)}"
    if least != estimate.ways[0]:
        given += f"; at the least {format_size(least.peak_bytes)}, {_words(least, spec)}"
    if (estimate.device == "cuda") != bool(spec.gpus):
        given += f"; as it was estimated for a {'GPU' if estimate.device == 'cuda' else 'CPU'}"
    fault = Fault(
        where="spec.estimate",
        given=given,
        allowed=f"at most {format_size(USABLE * memory)} {_each(spec)}: {_whose(spec, memory, own)}",
        fix=_nearest(estimate, spec, own, [node for node in nodes if node not in own]),
    )
    raise InvalidInput(
        f"this training does not fit in the memory of any machine {_place(spec)}", faults=[fault]
    )


def process_memory(spec: JobSpec, nodes: Sequence[Node]) -> float:
    """Return the most bytes that each process of the job could have on one of the nodes, which replicas may share."""
    if not spec.gpus:
        most = max((node.memory_bytes for node in nodes), default=0)
        return min(spec.memory_bytes or most / _sharing(spec, nodes), most) / spec.processes
    largest = max(
        (gpu.memory_bytes for node in nodes for gpu in node.gpus if gpu_matches(spec, gpu)), default=0
    )
    if spec.gpu_milli < WHOLE_GPU:
        return (spec.gpu_memory_bytes or largest * spec.gpu_milli / WHOLE_GPU) / spec.processes
    return largest * min(1.0, spec.gpus / spec.processes)


def _sharing(spec: JobSpec, nodes: Sequence[Node]) -> int:
    """Return how many replicas of the job must share a node at the least."""
    return -(-spec.nodes // max(1, len(nodes)))


def gpu_matches(spec: JobSpec, gpu: Gpu) -> bool:
    """Return whether `gpu` is of the kind that the job asks for."""
    return gpu.profile == spec.gpu_profile and (spec.gpu_models is None or gpu.model in spec.gpu_models)


def _nearest(estimate: JobMemoryEstimate, spec: JobSpec, own: Sequence[Node], others: Sequence[Node]) -> str:
    """Describe the first option that fits on one of its `own` nodes, else on one of the `others`."""
    for nodes in (own, others):
        for way in estimate.ways:
            sharing = _sharing(spec, nodes)
            holds = next((node for node in nodes if _holds(node, way, spec, sharing)), None)
            if holds is not None:
                where = "" if nodes is own else f"in pool {holds.pool}, "
                takes = f"{_words(way, spec)} takes {format_size(way.peak_bytes)} {_each(spec)}"
                return f"{where}{takes}{_options(way, spec)}"
    least = min(estimate.ways, key=lambda way: way.peak_bytes)
    return f"a smaller model or batch: {_words(least, spec)} still takes {format_size(least.peak_bytes)} {_each(spec)}"


def _holds(node: Node, way: TrainingPlan, spec: JobSpec, sharing: int) -> bool:
    """Return whether `node` holds the processes of `sharing` replicas."""
    processes = sharing * _per_node(way, spec)
    if not spec.gpus:
        return processes * way.peak_bytes <= USABLE * node.memory_bytes
    cards = sorted((gpu.memory_bytes for gpu in node.gpus if gpu_matches(spec, gpu)), reverse=True)
    if len(cards) < processes:
        return False
    memory = cards[processes - 1]
    return _need(way, spec, memory) <= USABLE * memory


def _need(way: TrainingPlan, spec: JobSpec, memory: float) -> int:
    data = spec.estimate.data_bytes if spec.estimate and spec.gpus else 0
    return way.peak_bytes + (data if data <= DATA_SHARE * memory else 0)


def _per_node(way: TrainingPlan, spec: JobSpec) -> int:
    return -(-way.processes // spec.nodes)


def _options(way: TrainingPlan, spec: JobSpec) -> str:
    """Return the command-line options that the job would need."""
    processes = _per_node(way, spec)
    options = [f"--processes {processes}"] if processes != spec.processes else []
    if spec.gpus and (processes != spec.gpus or spec.gpu_milli < WHOLE_GPU):
        options.append(f"--gpus {processes}")
    if not spec.gpus and spec.memory_bytes:
        options.append(f"--memory {-(-processes * way.peak_bytes // round(USABLE * GIB))}GiB")
    return f": {' '.join(options)}" if options else ""


def _words(way: TrainingPlan, spec: JobSpec) -> str:
    """Return, for example, 'fsdp 4, bf16, accumulate=8'."""
    parts = [way.layout, way.precision]
    parts += [f"accumulate={way.micro_batches}"] if way.micro_batches > 1 else []
    return ", ".join(parts)


def _whose(spec: JobSpec, memory: float, nodes: Sequence[Node]) -> str:
    if not spec.gpus:
        whole = "what the job asks for" if spec.memory_bytes else f"the largest machine {_place(spec)}"
        processes = spec.processes * (1 if spec.memory_bytes else _sharing(spec, nodes))
        among = f" for {processes} processes" if processes > 1 else ""
        return f"{whole} has {format_size(memory * processes)}{among}"
    part = (
        "the part of a GPU that it asks for" if memory and spec.gpu_milli < WHOLE_GPU else "the largest GPU"
    )
    return f"{part} has {format_size(memory)}" + (
        f", shared by {spec.processes} processes on {spec.gpus}" if spec.processes > spec.gpus else ""
    )


def _each(spec: JobSpec) -> str:
    return "a GPU" if spec.gpus and spec.gpus >= spec.processes else "a process"


def _place(spec: JobSpec) -> str:
    return f"in pool {' or '.join(sorted(spec.affinity.pools))}" if spec.affinity.pools else "here"


def _may_run_on(spec: JobSpec, node: Node) -> bool:
    wanted = spec.affinity
    in_pool = not wanted.pools or node.pool in wanted.pools
    return in_pool and wanted.labels <= node.labels and not wanted.avoid & node.labels
