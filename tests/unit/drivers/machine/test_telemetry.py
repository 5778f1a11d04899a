"""Telemetry of nodes and GPUs, and the metrics made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from falaj.control.metrics import PlatformMetrics
from falaj.drivers.machine.telemetry import read_gpus, read_telemetry
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from platforms import OwnPlatform
from recorded_machines import ReplayedNvml

GIB = 2**30
ORDER = ("node", "gpu", "model", "kind", "queue", "state")
CONSTANTS = {
    "nvmlMemory_v2": 2,
    "NVML_TEMPERATURE_GPU": 0,
    "NVML_PCIE_UTIL_TX_BYTES": 0,
    "NVML_PCIE_UTIL_RX_BYTES": 1,
    "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX": 138,
    "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX": 139,
    "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
}
CALLS: dict[str, Any] = {  # an H200 under load
    "nvmlDeviceGetCount()": 1,
    "nvmlDeviceGetHandleByIndex(0)": {"handle": "gpu0"},
    "nvmlDeviceGetUUID(gpu0)": "GPU-3d336153",
    "nvmlDeviceGetName(gpu0)": "NVIDIA H200",
    "nvmlDeviceGetMemoryInfo(gpu0, 2)": {"struct": {"total": 150754820096, "used": 1328545792}},
    "nvmlDeviceGetUtilizationRates(gpu0)": {"struct": {"gpu": 97, "memory": 40}},
    "nvmlDeviceGetTemperature(gpu0, 0)": 44,
    "nvmlDeviceGetPowerUsage(gpu0)": 554831,
    "nvmlDeviceGetTotalEnergyConsumption(gpu0)": 5581235,
    "nvmlDeviceGetPcieThroughput(gpu0, 1)": 52361618,
    "nvmlDeviceGetPcieThroughput(gpu0, 0)": 1392,
    "nvmlDeviceGetTotalEccErrors(gpu0, 0, 0)": 3,
    "nvmlDeviceGetTotalEccErrors(gpu0, 1, 0)": 0,
}


def library(**calls: Any) -> ReplayedNvml:
    return ReplayedNvml({"calls": CALLS | calls, "constants": CONSTANTS})


def test_a_card_reports_its_use_memory_heat_power_traffic_and_errors() -> None:
    (gpu,) = read_gpus(load=library)

    assert (gpu.id, gpu.model, gpu.busy) == ("GPU-3d336153", "NVIDIA H200", 0.97)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (1328545792, 150754820096)
    assert (gpu.temperature_c, gpu.power_w, gpu.energy_j) == (44, 554.831, 5581.235)
    assert gpu.pcie_bytes_per_s == {"received": 52361618 * 1024, "sent": 1392 * 1024}
    assert gpu.ecc_errors == {"corrected": 3, "uncorrected": 0}
    assert gpu.nvlink_bytes == {}


def test_nvlink_traffic_is_counted_over_all_links() -> None:
    counted = [
        {"struct": {"nvmlReturn": 0, "value": {"struct": {"ullVal": 7}}}},
        {"struct": {"nvmlReturn": 3, "value": {"struct": {"ullVal": 9}}}},
    ]

    class Linked(ReplayedNvml):
        def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> list[Any]:  # noqa: N802
            assert fields == [139, 138]
            return [json.loads(json.dumps(each), object_hook=_as_struct) for each in counted]

    (gpu,) = read_gpus(load=lambda: Linked({"calls": CALLS, "constants": CONSTANTS}))

    assert gpu.nvlink_bytes == {"received": 7 * 1024}


def _as_struct(found: dict[str, Any]) -> Any:
    from types import SimpleNamespace

    return found["struct"] if "struct" in found else SimpleNamespace(**found)


def test_a_card_that_says_nothing_is_listed_without_figures() -> None:
    silent = ReplayedNvml({"calls": {name: CALLS[name] for name in list(CALLS)[:4]}, "constants": CONSTANTS})

    (gpu,) = read_gpus(load=lambda: silent)

    assert (gpu.id, gpu.busy, gpu.memory_used_bytes, gpu.ecc_errors) == ("GPU-3d336153", None, None, {})


def test_a_driver_that_fails_leaves_the_other_figures(tmp_path: Path) -> None:
    broken = library(**{"nvmlInit()": {"error": "Driver/library version mismatch"}})
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1024 kB\nMemAvailable: 512 kB\nHugePages_Total: 0\n")

    found = read_telemetry("n1", root=tmp_path, load=lambda: broken)

    assert found.gpus == ()
    assert (found.memory_total_bytes, found.memory_available_bytes) == (1 << 20, 1 << 19)


def test_files_of_the_kernel_are_read(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "net").mkdir(parents=True)
    (proc / "stat").write_text("cpu  100 0 50 800 10 0 5 0 0 0\ncpu0 1 1 1 1\n")
    (proc / "loadavg").write_text("1.50 1.0 0.9 2/300 99\n")
    header = "Inter-| Receive\n face |bytes\n"
    (proc / "net/dev").write_text(header + "lo: 1 0 0 0 0 0 0 0 1 0\neth0: 900 1 0 0 0 0 0 0 800 1 0\n")
    disks = "8 0 sda 1 0 4 0 1 0 6 0\n8 1 sda1 1 0 4 0 1 0 6 0\n7 0 loop0 1 0 4 0 1 0 6 0\n"
    (proc / "diskstats").write_text(disks)

    found = read_telemetry("n1", root=tmp_path, volumes=[tmp_path, tmp_path / "gone"], load=library)

    assert found.cpu_s["user"] == 2 * found.cpu_s["system"] > 0
    assert found.load == 1.5
    assert found.network_bytes == {("eth0", "received"): 900, ("eth0", "sent"): 800}
    assert found.disk_bytes == {("sda", "read"): 2048, ("sda", "written"): 3072}
    assert list(found.volumes) == [str(tmp_path)]


def test_metrics_can_be_parsed_and_name_their_node_and_gpu(tmp_path: Path) -> None:
    text = PlatformMetrics([], [read_telemetry("n1", root=tmp_path, load=library)], {"risk": (2, 5)}).text()

    samples = {
        (each.name, *(each.labels[name] for name in ORDER if name in each.labels)): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }
    assert samples["falaj_queue_jobs", "risk", "queued"] == 5
    card = ("n1", "GPU-3d336153", "NVIDIA H200")
    assert samples["falaj_gpu_busy_ratio", *card] == 0.97
    assert samples["falaj_gpu_power_watts", *card] == 554.831
    assert samples["falaj_gpu_energy_joules_total", *card] == 5581.235
    assert samples["falaj_gpu_ecc_errors_total", *card, "corrected"] == 3


def test_an_operator_scrapes_nodes_and_queues(light_platform: OwnPlatform) -> None:
    auditor = light_platform.join("audrey", Role.AUDITOR, workspace="platform")

    with acting_as(auditor):
        text = light_platform.parts.services.platform.metrics().text

    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"falaj_node_cpus", "falaj_node_memory_bytes", "falaj_node_volume_bytes"} <= names
