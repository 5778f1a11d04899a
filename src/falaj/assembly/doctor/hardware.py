"""The check of what this machine offers to jobs: CPUs, GPUs, how those are joined and shared, and energy counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from falaj.assembly.doctor.findings import DoctorContext, ok, warn
from falaj.extras import how_to_install
from falaj.ports.machine.hardware import NodeFacts
from falaj.records.doctor import Finding
from falaj.records.sizes import format_size

NO_DRIVER = "Shared Library Not Found"


def check_hardware(context: DoctorContext) -> Iterable[Finding]:
    from falaj.drivers.machine.inventory import LocalMachine
    from falaj.drivers.processes.metering.energy import CpuEnergy

    mps = context.config.node.mps
    for facts in LocalMachine(mps_directory=mps).nodes():
        yield ok("hardware", describe(facts))
        yield from check_gpus(facts, mps)
        yield check_energy(facts, counts_cpus=CpuEnergy(Path("/")).is_available)


def describe(facts: NodeFacts) -> str:
    sockets = f" in {facts.sockets} sockets" if facts.sockets and facts.sockets > 1 else ""
    words = [f"{facts.cpus} CPUs{sockets} ({', '.join(sorted(facts.isa)) or 'no vector instructions known'})"]
    words.append(format_size(facts.memory_bytes))
    active = [port for port in facts.rdma if port.is_active]
    if facts.rdma:
        words.append(f"{len(active)} of {len(facts.rdma)} RDMA ports active")
    return ", ".join(words)


def check_gpus(facts: NodeFacts, mps: Path) -> Iterable[Finding]:
    if facts.gpus:
        kinds = Counter(f"{gpu.model} {gpu.profile or ''}".strip() for gpu in facts.gpus)
        islands = len({card.island for card in facts.cards})
        joined = (
            f", in {islands} NVLink {'island' if islands == 1 else 'islands'}"
            if islands < len(facts.cards)
            else ""
        )
        shared = f"MPS answers in {mps}" if facts.shares else f"no MPS in {mps}, so no parts of a GPU"
        yield ok("gpus", f"{', '.join(f'{count} {kind}' for kind, count in kinds.items())}{joined}; {shared}")
    if not facts.gpu_fault:
        return
    is_absent = not facts.cards and (NO_DRIVER in facts.gpu_fault or not has_device())
    if is_absent:
        yield ok("gpus", f"none: {facts.gpu_fault}")
    else:
        fix = how_to_install("pynvml") if "not installed" in facts.gpu_fault else "see nvidia-smi and dmesg"
        yield warn("gpus", facts.gpu_fault, fix=fix)


def has_device() -> bool:
    """Whether the kernel knows an NVIDIA card, whatever its library says."""
    return Path("/dev/nvidiactl").exists()


def check_energy(facts: NodeFacts, *, counts_cpus: bool) -> Finding:
    counting = [card for card in facts.cards if card.counts_energy]
    cpus = "of the CPUs (RAPL)" if counts_cpus else ""
    cards = f"of {len(counting)} of {len(facts.cards)} GPUs (NVML)" if facts.cards else ""
    counted = " and ".join(each for each in (cpus, cards) if each)
    return ok("energy", f"counted {counted}" if counted else "not counted here: jobs are charged without it")
