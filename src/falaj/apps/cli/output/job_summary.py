"""Short descriptions of a job: its state, progress, request and command."""

from __future__ import annotations

from datetime import timedelta

from falaj.apps.cli.output.values import format_number, plural, printable
from falaj.records.scheduling.snapshot import WHOLE_GPU, Affinity
from falaj.records.sizes import format_size, spell_size
from falaj.records.training.jobs import (
    Job,
    JobMemoryEstimate,
    JobProgress,
    JobSpec,
    JobState,
    RequestedResources,
)


def describe_state(job: Job) -> str:
    """Return its state, or what it is changing to."""
    if job.cancelling and not job.state.ended:
        return "stopping"
    if job.state is JobState.RUNNING and job.leaving:
        return "moving" if job.moving else "being preempted"
    return job.state.value


def progress_line(progress: JobProgress) -> str:
    """Return its progress in one line."""
    parts = [f"step {describe_step(progress)}"]
    parts += [f"loss {format_number(progress.loss)}"] if progress.loss is not None else []
    parts += [format_rate(progress.rate)] if progress.rate else []
    parts += [f"{format_rough_duration(progress.left)} left"] if progress.left else []
    return ", ".join(parts)


def describe_step(progress: JobProgress) -> str:
    return f"{progress.step} of {progress.total}" if progress.total else str(progress.step)


def format_rate(rate: float | None) -> str:
    """Return steps per second, or seconds per step, whichever is above one."""
    if not rate:
        return "-"
    if rate >= 1000:
        return f"{rate:,.0f} steps/s"
    return f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step"


def format_rough_duration(left: timedelta | None) -> str:
    """Return a rounded duration: 40s, 12m, 3h 20m, 2d 4h."""
    if left is None:
        return "-"
    seconds = round(left.total_seconds())
    if seconds < 60:
        return f"{seconds}s"
    minutes = seconds // 60
    if minutes < 60:
        return f"{minutes}m"
    hours = minutes // 60
    return f"{hours}h {minutes % 60}m" if hours < 48 else f"{hours // 24}d {hours % 24}h"


def describe_gpus(spec: JobSpec) -> str:
    """Return the whole GPUs of all nodes, a share of one, or MIG slices: 2, 0.25, 2 × 1g.18gb."""
    return _gpu_count(spec, spec.nodes * spec.gpus)


def _gpu_count(spec: JobSpec, count: int) -> str:
    if not count:
        return "0"
    if spec.gpu_milli < WHOLE_GPU:
        return f"{spec.gpu_milli / WHOLE_GPU:g}"
    return f"{count} × {spec.gpu_profile}" if spec.gpu_profile else str(count)


def describe_request(spec: JobSpec) -> str:
    """Return the resources that it requests."""
    parts = [plural(spec.cpus, "CPU")]
    if spec.gpus:
        kind = f" ({', '.join(sorted(spec.gpu_models))})" if spec.gpu_models else ""
        noun = "of a GPU" if spec.gpu_milli < WHOLE_GPU else "GPU" if spec.gpus == 1 else "GPUs"
        parts.append(f"{_gpu_count(spec, spec.gpus)} {noun}{printable(kind)}")
    sizes = (
        ("of GPU memory", spec.gpu_memory_bytes),
        ("of memory", spec.memory_bytes),
        ("of disk", spec.disk_bytes),
    )
    parts += [f"{spell_size(count)} {what}" for what, count in sizes if count]
    return (f"{spec.nodes} nodes, each with " if spec.nodes > 1 else "") + ", ".join(parts)


def describe_memory(estimate: JobMemoryEstimate) -> str:
    """Return the estimated memory of its training, and its parts."""
    way = estimate.ways[0]
    kinds = (
        ("parameters", estimate.parameters_bytes),
        ("gradients", estimate.gradients_bytes),
        ("optimizer", estimate.state_bytes),
        ("activations", estimate.activations_bytes),
    )
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in kinds)
    how = f"{way.layout}, {way.precision}, batch {estimate.batch_size}"
    pieces = f" in {way.micro_batches} micro-batches" if way.micro_batches > 1 else ""
    return f"about {format_size(way.peak_bytes)} a process ({how}{pieces}): {parts}"


def describe_original_request(asked: RequestedResources) -> str:
    """Return what it requested before it was moved."""
    share = f"{asked.gpu_milli / WHOLE_GPU:g} of a GPU"
    gpus = share if asked.gpu_milli < WHOLE_GPU else plural(asked.gpus, "GPU")
    parts = [plural(asked.cpus, "CPU"), gpus]
    parts += [f"pools {', '.join(sorted(asked.pools))}"] if asked.pools else []
    return ", ".join(parts)


def describe_command(spec: JobSpec) -> str:
    """Return what it runs, and with which framework and processes."""
    line = " ".join([spec.script or f"-m {spec.module}", *spec.args])
    notes: list[str] = [] if spec.framework == "plain" else [spec.framework]
    few = f"{spec.processes_min} to " if spec.processes_min else ""
    nodes = f"{spec.nodes} nodes × " if spec.nodes > 1 else ""
    noun = "process" if spec.processes == 1 else "processes"
    notes += [f"{nodes}{few}{spec.processes} {noun}"] if spec.world_size > 1 else []
    notes += [f"{count} {role}" for role, count in sorted(spec.roles.items())]
    notes += [f"environment {spec.environment}"] if spec.environment else []
    return printable(line) + (f" ({', '.join(notes)})" if notes else "")


def describe_affinity(affinity: Affinity) -> str:
    """Return its affinity."""
    parts = [
        f"{name} {', '.join(sorted(value))}"
        for name in ("pools", "labels", "avoid", "near", "apart")
        if (value := getattr(affinity, name))
    ]
    parts += ["spread"] if affinity.spread else []
    parts += [f"one {affinity.island} island"] if affinity.island else []
    return "; ".join(parts)
