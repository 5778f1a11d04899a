"""Metrics of nodes, queues and jobs for Prometheus, beside those of the answering process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from falaj.ports.machine.hardware import GpuTelemetry, NodeTelemetry
from falaj.records.scheduling.hardware import Machine
from falaj.records.scheduling.snapshot import WHOLE_GPU


class PlatformMetrics:
    """What is known of the nodes and the jobs, as one collector."""

    def __init__(
        self,
        machines: Iterable[Machine],
        telemetry: Iterable[NodeTelemetry],
        jobs: Mapping[str, tuple[int, int]],
    ) -> None:
        """`jobs` are the numbers of running and of queued jobs by queue."""
        self._machines, self._telemetry, self._jobs = list(machines), list(telemetry), jobs

    def collect(self) -> Iterator[Metric]:
        yield from self._queues()
        yield from self._nodes()
        yield from self._machine_levels()
        yield from self._gpus()

    def text(self) -> str:
        """Return the metrics in the text format of Prometheus."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()

    def _queues(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("falaj_queue_jobs", "Jobs by queue and state", labels=["queue", "state"])
        for queue, (running, queued) in sorted(self._jobs.items()):
            jobs.add_metric([queue, "running"], running)
            jobs.add_metric([queue, "queued"], queued)
        yield jobs

    def _nodes(self) -> Iterator[Metric]:
        names = ["node", "pool", "zone"]
        families = {
            "jobs": GaugeMetricFamily("falaj_node_jobs", "Jobs that run on a node", labels=names),
            "cordoned": GaugeMetricFamily(
                "falaj_node_cordoned", "1 if a node starts no further jobs", labels=names
            ),
            "lost": GaugeMetricFamily("falaj_node_lost", "1 if a node does not answer", labels=names),
            "cpus": GaugeMetricFamily("falaj_node_cpus", "CPUs for jobs", labels=[*names, "state"]),
            "gpus": GaugeMetricFamily("falaj_node_gpus", "GPUs for jobs", labels=[*names, "state"]),
        }
        for machine in self._machines:
            node, free = machine.node, machine.free
            where = [node.name, node.pool, node.zone]
            free_gpus = sum(free.gpu_milli) / WHOLE_GPU
            families["jobs"].add_metric(where, machine.jobs)
            families["cordoned"].add_metric(where, float(node.cordoned))
            families["lost"].add_metric(where, float(machine.is_lost))
            if machine.is_lost:
                continue
            families["cpus"].add_metric([*where, "free"], free.cpus)
            families["cpus"].add_metric([*where, "held"], node.cpus - free.cpus)
            families["gpus"].add_metric([*where, "free"], free_gpus)
            families["gpus"].add_metric([*where, "held"], len(node.gpus) - free_gpus)
        yield from families.values()

    def _machine_levels(self) -> Iterator[Metric]:
        cpu = CounterMetricFamily("falaj_node_cpu_seconds", "CPU seconds by mode", labels=["node", "mode"])
        load = GaugeMetricFamily("falaj_node_load", "Runnable tasks, over one minute", labels=["node"])
        memory = GaugeMetricFamily("falaj_node_memory_bytes", "Memory", labels=["node", "state"])
        network = CounterMetricFamily(
            "falaj_node_network_bytes", "Bytes over the network", labels=["node", "adapter", "direction"]
        )
        disk = CounterMetricFamily(
            "falaj_node_disk_bytes", "Bytes read and written", labels=["node", "disk", "direction"]
        )
        volume = GaugeMetricFamily(
            "falaj_node_volume_bytes", "Volumes that the platform writes to", labels=["node", "path", "state"]
        )
        for node in self._telemetry:
            for mode, seconds in node.cpu_s.items():
                cpu.add_metric([node.name, mode], seconds)
            _add(load, [node.name], node.load)
            _add(memory, [node.name, "total"], node.memory_total_bytes)
            _add(memory, [node.name, "available"], node.memory_available_bytes)
            for (adapter, direction), count in node.network_bytes.items():
                network.add_metric([node.name, adapter, direction], count)
            for (device, direction), count in node.disk_bytes.items():
                disk.add_metric([node.name, device, direction], count)
            for path, (total, free) in node.volumes.items():
                volume.add_metric([node.name, path, "total"], total)
                volume.add_metric([node.name, path, "free"], free)
        yield from (cpu, load, memory, network, disk, volume)

    def _gpus(self) -> Iterator[Metric]:
        names = ["node", "gpu", "model"]
        busy = GaugeMetricFamily("falaj_gpu_busy_ratio", "Share of time in which a kernel ran", labels=names)
        memory = GaugeMetricFamily("falaj_gpu_memory_bytes", "Memory of GPUs", labels=[*names, "state"])
        heat = GaugeMetricFamily("falaj_gpu_temperature_celsius", "Temperature of GPUs", labels=names)
        power = GaugeMetricFamily("falaj_gpu_power_watts", "Power of GPUs", labels=names)
        energy = CounterMetricFamily("falaj_gpu_energy_joules", "Energy of GPUs", labels=names)
        pcie = GaugeMetricFamily(
            "falaj_gpu_pcie_bytes_per_second", "Traffic over PCIe", labels=[*names, "direction"]
        )
        nvlink = CounterMetricFamily(
            "falaj_gpu_nvlink_bytes", "Data over NVLink", labels=[*names, "direction"]
        )
        ecc = CounterMetricFamily("falaj_gpu_ecc_errors", "ECC errors of GPUs", labels=[*names, "kind"])
        for node, gpu in self._every_gpu():
            of = [node, gpu.id, gpu.model]
            _add(busy, of, gpu.busy)
            _add(memory, [*of, "total"], gpu.memory_total_bytes)
            _add(memory, [*of, "used"], gpu.memory_used_bytes)
            _add(heat, of, gpu.temperature_c)
            _add(power, of, gpu.power_w)
            _add(energy, of, gpu.energy_j)
            for direction, rate in gpu.pcie_bytes_per_s.items():
                pcie.add_metric([*of, direction], rate)
            for direction, count in gpu.nvlink_bytes.items():
                nvlink.add_metric([*of, direction], count)
            for kind, errors in gpu.ecc_errors.items():
                ecc.add_metric([*of, kind], errors)
        yield from (busy, memory, heat, power, energy, pcie, nvlink, ecc)

    def _every_gpu(self) -> Iterator[tuple[str, GpuTelemetry]]:
        for node in self._telemetry:
            for gpu in node.gpus:
                yield node.name, gpu


def _add(family: GaugeMetricFamily | CounterMetricFamily, labels: list[str], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, value)
