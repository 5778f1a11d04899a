"""`falaj nodes`: the nodes that run jobs, and how they are taken out of service and back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from falaj.apps.cli.commands.nodes_gpus import configure_gpus, plan_mig, render_gpus
from falaj.apps.cli.generation import arguments
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message, command_with, print_message
from falaj.apps.cli.output.prompts import confirm
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_value, plural, printable
from falaj.apps.cli.output.work_progress import require_controller
from falaj.apps.cli.session import Session
from falaj.errors import InvalidInput, NotFound, Unavailable
from falaj.records.durations import RULE, read_duration
from falaj.records.scheduling.hardware import Machine, NodeDrain
from falaj.records.scheduling.scale_up import ScaleUpHint
from falaj.records.scheduling.snapshot import WHOLE_GPU
from falaj.records.sizes import format_size

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform

PRESENTATION = Presentation(
    help={"node": "A node: its name.", "reason": "Why, for those who look at the node."},
    examples={"node": "gpu-07", "reason": "a fan is replaced"},
    lists={"node": "nodes list"},
)

PRESENTATION.commands |= {
    "plan-mig": plan_mig,
    "render-gpus": render_gpus,
    "configure-gpus": configure_gpus,
}

POLL_S = 1.0


@PRESENTATION.command("list")
def list_nodes(session: Session) -> None:
    """List the nodes that run jobs, and what is free on each."""
    with session.platform() as platform:
        found = platform.nodes.list()
    session.show(found, _print_all)


@PRESENTATION.command("scale-up")
def scale_up(session: Session) -> None:
    """List the waiting jobs for which autoscalers are asked for nodes."""
    with session.platform() as platform:
        found = platform.nodes.scale_up()
    session.show(found, _print_hints)


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


@PRESENTATION.message("nodes.cordon")
def _cordoned(made: Machine, given: Given) -> Message:
    goes_on = (
        f"; {plural(made.jobs, 'job')} on it {'goes' if made.jobs == 1 else 'go'} on" if made.jobs else ""
    )
    return Message(
        f"node {made.node.name} starts no further jobs{goes_on}",
        (("next", command_with("nodes drain", made.node.name)), _undo(made)),
    )


@PRESENTATION.message("nodes.uncordon")
def _uncordoned(made: Machine, given: Given) -> Message:
    if made.node.cordoned and made.cluster is not None:
        why = made.cluster.reason or "the cluster keeps it closed"
        return Message(
            f"node {made.node.name} is no longer cordoned by this platform, and still starts no jobs: {why}",
            (("see", command_with("nodes show", made.node.name)),),
        )
    return Message(f"node {made.node.name} starts jobs again", (("see", "nodes list"),))


@PRESENTATION.command("drain")
def drain(
    session: Session,
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node: its name.")],
    *,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for those who look at the node.")] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Stop jobs that are not preemptible as well.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until no job runs there.")] = True,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Wait at most this long, such as 30m.")
    ] = None,
    yes: arguments.YES = False,
) -> None:
    """Take a node out of service: its jobs save a checkpoint, go back to their queues and continue elsewhere."""
    limit = None if timeout is None else _limit(timeout)
    confirm(f"drain {node}: its jobs save a checkpoint and stop. Continue?", yes=yes)
    with session.platform() as platform:
        made = platform.nodes.drain(node, reason=reason, force=force)
        if not session.json:
            print_message(session, _drained(made))
        if wait:
            made = made.model_copy(update={"machine": _wait_until_empty(session, platform, made, limit)})
    if not session.json:
        _print_others(made)
    if session.json:
        session.show(made, lambda _: None)


def _print_others(made: NodeDrain) -> None:
    """Say what else is on the node: the platform touches only its own jobs."""
    if made.unseen:
        print(f"what else runs there is not known: {printable(made.unseen)}")
    if made.others:
        print(f"{plural(len(made.others), 'pod')} of others stay there:")
        rows = [[printable(text) for text in (each.namespace, each.name, each.owner)] for each in made.others]
        show_rows(["namespace", "pod", "owner"], rows)


def _limit(timeout: str) -> timedelta:
    found = read_duration(timeout)
    if found is None:
        raise InvalidInput.at("--timeout", given=timeout, allowed=RULE, fix="--timeout 30m")
    return found


def _drained(made: NodeDrain) -> Message:
    words = [f"node {made.machine.node.name} starts no further jobs"]
    if made.leaving:
        words.append(f"{plural(len(made.leaving), 'job')} to save a checkpoint and stop")
    if made.staying:
        words.append(f"{plural(len(made.staying), 'job')} not preemptible: --force stops them too")
    return Message("; ".join(words), (_undo(made.machine),))


def _undo(machine: Machine) -> tuple[str, str]:
    return "undo", command_with("nodes uncordon", machine.node.name)


def _wait_until_empty(
    session: Session, platform: Platform, made: NodeDrain, limit: timedelta | None
) -> Machine:
    """Return the node when no job runs on it. It stays drained where the wait ends before."""
    name, began, said = made.machine.node.name, time.monotonic(), -1
    while True:
        machine = next((each for each in platform.nodes.list() if each.node.name == name), made.machine)
        if machine.jobs != said and not session.json:
            said = machine.jobs
            left = f"{plural(said, 'job')} still on node {name}" if said else f"node {name} is empty"
            print(left, flush=True)
        if not machine.jobs:
            return machine
        if limit is not None and time.monotonic() - began > limit.total_seconds():
            raise Unavailable(
                f"{plural(machine.jobs, 'job')} still on node {name}, which stays drained; wait again with "
                f"falaj nodes drain {name}"
            )
        time.sleep(POLL_S)
        require_controller(platform)


def _print_all(machines: Sequence[Machine]) -> None:
    headings = [
        "node",
        "state",
        "jobs",
        "zone",
        "pool",
        "free CPUs",
        "free memory",
        "free GPUs",
        "GPUs",
        "fabric",
    ]
    show_rows(headings, [_row(each) for each in machines])


def _row(machine: Machine) -> list[str]:
    node = machine.node
    shown = ["-", "-", "-"] if machine.is_lost else _free(machine)
    return [
        node.name,
        _state(machine),
        str(machine.jobs),
        node.zone,
        node.pool,
        *shown,
        _kinds(machine),
        node.fabric or "-",
    ]


def _free(machine: Machine) -> list[str]:
    node, free = machine.node, machine.free
    return [
        f"{free.cpus} of {node.cpus}",
        f"{format_size(free.memory_bytes)} of {format_size(node.memory_bytes)}",
        f"{sum(free.gpu_milli) / WHOLE_GPU:.3g} of {len(node.gpus)}",
    ]


def _state(machine: Machine) -> str:
    if machine.is_lost:
        return "lost"
    if machine.cordon is not None and machine.cordon.drained:
        return "drained" if not machine.jobs else "draining"
    return "cordoned" if machine.node.cordoned else "ready"


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
        "state": _state(machine) + _cordon(machine),
        **_of_the_cluster(machine),
        "jobs": str(machine.jobs),
        **_held_by_others(machine),
        "zone": f"{node.zone} ({node.jurisdiction})",
        "pool": node.pool
        + (", burst capacity: used if no other cluster can take a job" if node.burst else ""),
        **_price(machine),
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


def _cordon(machine: Machine) -> str:
    found = machine.cordon
    if found is None:
        return ""
    return f" since {format_value(found.since)} by {found.by}" + (f": {found.reason}" if found.reason else "")


def _of_the_cluster(machine: Machine) -> dict[str, str]:
    """Return what the cluster says of the node, as far as it says anything."""
    there = machine.cluster
    if there is None:
        return {}
    since = f" since {format_value(there.since)}" if there.since else ""
    said = f"{there.state}{since}" + (f": {there.reason}" if there.reason else "")
    if machine.cordon is not None and there.state == "ready":
        said += "; someone has uncordoned it there, and jobs do not start"
    facts = {
        "in the cluster": said,
        "taints that keep jobs off": ", ".join(there.taints),
        "spot": "yes: it can be taken away at any moment" if there.spot else "",
        "autoscaling": "; ".join(there.autoscaling),
        "MIG configuration": " ".join(filter(None, (there.mig_config, there.mig_state))),
        "sharing configuration": there.sharing_config or "",
    }
    return {name: text for name, text in facts.items() if text}


def _print_hints(hints: Sequence[ScaleUpHint]) -> None:
    rows = [[each.job, str(each.pods), _shape(each), each.like, each.cluster or "-"] for each in hints]
    show_rows(["job", "pods", "each", "on nodes like", "cluster"], rows)


def _shape(hint: ScaleUpHint) -> str:
    each = hint.each
    gpus = plural(each.gpus, f"slice {each.gpu_profile}" if each.gpu_profile else "GPU") if each.gpus else ""
    memory = format_size(each.memory_bytes) if each.memory_bytes else ""
    return ", ".join(part for part in (plural(each.cpus, "CPU"), gpus, memory) if part)


def _price(machine: Machine) -> dict[str, str]:
    """Return what an hour costs in its cluster, if clusters differ."""
    price = machine.node.price
    if price is None:
        return {}
    models = "".join(f", {each:g} a {model}" for model, each in sorted(price.gpus.items()))
    return {"price of an hour": f"{price.cpu:g} a CPU, {price.gpu:g} a GPU{models}"}


def _held_by_others(machine: Machine) -> dict[str, str]:
    """Return what pods of others hold, if they hold anything."""
    held = machine.node.others
    if held is None:
        return {}
    gpus = sum(held.gpus.values())
    parts = [plural(held.cpus, "CPU"), plural(gpus, "GPU") if gpus else "", format_size(held.memory_bytes)]
    return {"held by others": ", ".join(part for part in parts if part)}


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
