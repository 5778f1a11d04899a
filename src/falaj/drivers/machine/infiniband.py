"""The RDMA adapters of a machine, InfiniBand and RoCE, as the kernel lists them."""

from __future__ import annotations

import re
from pathlib import Path

from falaj.drivers.machine.kernel_files import list_entries, read_number, read_text
from falaj.records.scheduling.hardware import RdmaPort

CLASS = "sys/class/infiniband"
INFINIBAND = "infiniband"


def rdma_ports(root: Path) -> tuple[RdmaPort, ...]:
    """Every port of every adapter, in the order of their names."""
    return tuple(
        describe_port(device, port)
        for device in list_entries(root / CLASS)
        for port in list_entries(device / "ports")
        if port.name.isdecimal()
    )


def describe_port(device: Path, port: Path) -> RdmaPort:
    link = read_text(port / "link_layer").lower() or "unknown"
    return RdmaPort(
        device=device.name,
        port=int(port.name),
        link=link,
        state=parse_state(read_text(port / "state")),
        rate_gbps=parse_rate_gbps(read_text(port / "rate")),
        fabric=subnet(read_text(port / "gids/0")) if link == INFINIBAND else None,
        numa_node=read_number(device / "device/numa_node"),
    )


def parse_state(told: str) -> str:
    """`4: ACTIVE` is active."""
    return told.partition(":")[2].strip().lower() or "unknown"


def parse_rate_gbps(told: str) -> float | None:
    """`400 Gb/sec (4X NDR)` is 400."""
    found = re.match(r"([\d.]+) Gb/sec", told)
    return float(found[1]) if found else None


def subnet(gid: str) -> str | None:
    """The first half of a port's address, which all ports of one subnet have in common."""
    parts = gid.split(":")
    return "".join(parts[:4]) if len(parts) == 8 and any(part.strip("0") for part in parts) else None
