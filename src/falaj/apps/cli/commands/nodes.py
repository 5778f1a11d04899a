"""`falaj nodes`: the nodes that run jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer

from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_value, plural, printable
from falaj.apps.cli.session import Session
from falaj.errors import NotFound
from falaj.records.scheduling.hardware import Machine
from falaj.records.scheduling.snapshot import WHOLE_GPU
from falaj.records.sizes import format_size

PRESENTATION = Presentation()


@PRESENTATION.command("list")
def list_nodes(session: Session) -> None:
    """List the nodes that run jobs, and what is free on each."""
    with session.platform() as platform:
        found = platform.nodes.list()
    session.show(found, _print_all)


@PRESENTATION.command("show")
def show_node(
    session: Session,
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="A node: its name. (default: all of them)")
    ] = None,
) -> None:
    """Show the hardware of a node: CPUs, GPUs and their links, MIG slices, network adapters."""
    with session.platform() as platform:
        found = platform.nodes.list()
    chosen = tuple(each for each in found if node in (None, each.node.name))
    if not chosen:
        raise NotFound(f"there is no node {node}; list them with falaj nodes list")
    session.show(chosen, _print_each)


def _print_all(machines: Sequence[Machine]) -> None:
    headings = ["node", "zone", "pool", "free CPUs", "free memory", "free GPUs", "GPUs", "fabric"]
    show_rows(headings, [_row(each) for each in machines])


def _row(machine: Machine) -> list[str]:
    node, free = machine.node, machine.free
    return [
        node.name,
        node.zone,
        node.pool,
        f"{free.cpus} of {node.cpus}",
        f"{format_size(free.memory_bytes)} of {format_size(node.memory_bytes)}",
        f"{sum(free.gpu_milli) / WHOLE_GPU:.3g} of {len(node.gpus)}",
        _kinds(machine),
        node.fabric or "-",
    ]


def _kinds(machine: Machine) -> str:
    kinds = Counter(f"{gpu.model} {gpu.profile or ''}".strip() for gpu in machine.node.gpus)
    return printable(", ".join(f"{count} {kind}" for kind, count in kinds.items())) or "-"


def _print_each(machines: Sequence[Machine]) -> None:
    for number, machine in enumerate(machines):
        if number:
            print()
        show_fields(_facts(machine))
        if machine.cards:
            print()
            show_rows(*_cards(machine))
        if machine.rdma:
            print()
            show_rows(*_ports(machine))


def _facts(machine: Machine) -> dict[str, str]:
    node, free = machine.node, machine.free
    sockets = plural(machine.sockets, "socket") if machine.sockets else ""
    parts = plural(machine.numa_nodes, "NUMA node") if machine.numa_nodes else ""
    facts = {
        "node": node.name,
        "zone": f"{node.zone} ({node.jurisdiction})",
        "pool": node.pool,
        "labels": format_value(node.labels),
        "CPUs": f"{node.cpus}, {free.cpus} free",
        "CPU": ", ".join(each for each in (machine.cpu_model, sockets, parts) if each),
        "instruction sets": format_value(machine.isa),
        "memory": f"{format_size(node.memory_bytes)}, {format_size(free.memory_bytes)} free",
        "GPUs": _gpus(machine),
        "shared by MPS": format_value(node.shares),
        "fabric": node.fabric or "-",
    }
    return {name: printable(text) for name, text in facts.items()}


def _gpus(machine: Machine) -> str:
    there = f"{_kinds(machine)}, {machine.free.gpus} free whole" if machine.node.gpus else "none"
    driver = f", driver {machine.driver}" if machine.driver else ""
    return there + driver + (f" ({machine.gpu_fault})" if machine.gpu_fault else "")


def _cards(machine: Machine) -> tuple[list[str], list[list[str]]]:
    headings = ["card", "model", "memory", "CUDA", "island", "NVLinks", "PCIe", "NUMA", "slices", "id"]
    rows = [
        [
            str(card.index),
            printable(card.model),
            format_size(card.memory_bytes),
            card.compute_capability or "-",
            str(card.island),
            str(card.nvlinks),
            f"{card.pci_address or '-'} gen {format_value(card.pcie_generation)} x{format_value(card.pcie_width)}",
            format_value(card.numa_node),
            printable(", ".join(each.profile for each in card.slices)) or "-",
            printable(card.id),
        ]
        for card in machine.cards
    ]
    return headings, rows


def _ports(machine: Machine) -> tuple[list[str], list[list[str]]]:
    headings = ["adapter", "port", "link", "state", "Gb/s", "NUMA", "subnet"]
    rows = [
        [
            printable(port.device),
            str(port.port),
            printable(port.link),
            printable(port.state),
            "-" if port.rate_gbps is None else f"{port.rate_gbps:g}",
            format_value(port.numa_node),
            port.fabric or "-",
        ]
        for port in machine.rdma
    ]
    return headings, rows
