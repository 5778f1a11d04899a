"""`falaj nodes plan-mig`, `render-gpus` and `configure-gpus`: how the GPUs of nodes are cut and shared."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from falaj.apps.cli.generation import arguments
from falaj.apps.cli.output.messages import Message, command_with, print_message
from falaj.apps.cli.output.prompts import confirm
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import plural, printable
from falaj.apps.cli.session import Session
from falaj.errors import InvalidInput, Unavailable
from falaj.records.scheduling.mig import CardSlices, GpuConfiguration, GpuSettings, MigPlan

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform

POLL_S, PATIENCE_S = 2.0, 900.0
CARD = re.compile(r"(\d{1,3})=(whole|[\w.+]+:\d(?:,[\w.+]+:\d)*)")
RULE = "a card and its slices, like 0=3g.40gb:1,1g.10gb:4, or 0=whole"


def plan_mig(session: Session) -> None:
    """Show how idle GPUs would have to be cut by MIG so that waiting jobs could start. Nothing is changed."""
    with session.platform() as platform:
        found = platform.nodes.plan_mig()
        on_cluster = any(each.cluster is not None for each in platform.nodes.list())
    session.show(found, lambda plan: _print_plan(session, plan, on_cluster=on_cluster))


def render_gpus(
    session: Session,
    *,
    to: Annotated[
        str, typer.Option(metavar="PROGRAM", help="NVIDIA's mig-manager, or its device-plugin.")
    ] = "mig-manager",
    namespace: Annotated[
        str, typer.Option(metavar="NAMESPACE", help="The namespace of the GPU operator.")
    ] = "gpu-operator",
) -> None:
    """Print a ConfigMap for NVIDIA's GPU operator: the planned MIG layouts, or ways to share GPUs."""
    from falaj.scheduling.mig import render

    if to not in ("mig-manager", "device-plugin"):
        raise InvalidInput.at("--to", given=to, allowed="mig-manager or device-plugin")
    import yaml

    data, labels = dict[str, str](), dict[str, str]()
    if to == "mig-manager":
        with session.platform() as platform:
            plan = platform.nodes.plan_mig()
        layouts = render.mig_parted(plan.configurations)
        data, labels = {"config.yaml": yaml.safe_dump(layouts, sort_keys=False)}, plan.nodes
        made = render.config_map(render.MIG_MAP, namespace, data)
    else:
        named = render.sharing_configurations()
        data = {name: yaml.safe_dump(each, sort_keys=False) for name, each in named.items()}
        made = render.config_map(render.PLUGIN_MAP, namespace, data)
    if session.json:
        session.show(made, lambda _: None)
        return
    print(yaml.safe_dump(made, sort_keys=False, width=120), end="")
    for node, name in labels.items():
        print(f"# falaj nodes drain {node} && falaj nodes configure-gpus {node} --mig {name}")


def configure_gpus(
    session: Session,
    node: Annotated[str, typer.Argument(metavar="NODE", help="A drained node: its name.")],
    *,
    mig: Annotated[
        str | None, typer.Option(metavar="NAME", help="On a cluster: a configuration of the MIG manager.")
    ] = None,
    sharing: Annotated[
        str | None, typer.Option(metavar="NAME", help="On a cluster: a configuration of the device plugin.")
    ] = None,
    card: Annotated[
        list[str] | None,
        typer.Option(metavar="CARD=SLICES", help="On one machine: like 0=1g.10gb:7, or 0=whole. Several."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait for the MIG manager, and undo what fails.")
    ] = True,
    yes: arguments.YES = False,
) -> None:
    """Cut the GPUs of a drained node by MIG, or share them by time-slicing or MPS."""
    cards = tuple(_card(each) for each in card or ())
    settings = GpuSettings(mig=mig, sharing=sharing, cards=cards)
    confirm(f"change the GPUs of {node}: what uses them ends. Continue?", yes=yes)
    with session.platform() as platform:
        done = platform.nodes.configure_gpus(node, settings=settings)
        if mig is not None and wait:
            _await_mig(platform, done)
    if session.json:
        session.show(done, lambda _: None)
        return
    print_message(
        session,
        Message(
            f"the GPUs of node {node} are as asked for", (("next", command_with("nodes uncordon", node)),)
        ),
    )


def _card(given: str) -> CardSlices:
    found = CARD.fullmatch(given)
    if found is None:
        raise InvalidInput.at("--card", given=given, allowed=RULE, fix="--card 0=1g.10gb:7")
    parts = [] if found[2] == "whole" else [each.rpartition(":") for each in found[2].split(",")]
    slices = tuple(profile for profile, _, count in parts for _ in range(int(count)))
    return CardSlices(card=int(found[1]), slices=slices)


def _await_mig(platform: Platform, done: GpuConfiguration) -> None:
    """Wait until the MIG manager has cut the GPUs. If it failed, set the node back to what it had."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S:
        there = next((each.cluster for each in platform.nodes.list() if each.node.name == done.node), None)
        state = "" if there is None or there.mig_config != done.settings.mig else there.mig_state
        if state == "success":
            return
        if state == "failed":
            undone = "it had no configuration before"
            if done.before.mig is not None:
                platform.nodes.configure_gpus(done.node, settings=GpuSettings(mig=done.before.mig))
                undone = f"it is set back to {done.before.mig}"
            raise Unavailable(
                f"the MIG manager could not cut the GPUs of node {done.node} as {done.settings.mig}; {undone}; "
                "its pod's log says why"
            )
        time.sleep(POLL_S)
    raise Unavailable(
        f"the MIG manager has not reported on node {done.node} for {PATIENCE_S / 60:.0f} minutes: is it installed, and "
        f"does its ConfigMap have {done.settings.mig}? falaj nodes render-gpus prints it"
    )


def _print_plan(session: Session, plan: MigPlan, *, on_cluster: bool) -> None:
    headings = ["GPUs", "waiting", "free", "jobs of the last 7 days"]
    rows = [
        [each.profile or "whole", str(each.waiting), str(each.free), str(each.recent)] for each in plan.demand
    ]
    show_rows(headings, rows)
    if plan.cards:
        print()
        changes = [
            [each.node, str(each.card), printable(each.model), _slices(each.now), _slices(each.then)]
            for each in plan.cards
        ]
        show_rows(["node", "card", "model", "now", "then"], changes)
    for each in plan.shares:
        print(f"job {each.job} asks for a share of a GPU: --gpu-profile {each.profile} would hold it")
    if plan.unserved:
        words = f"{plural(len(plan.unserved), 'job')} would still wait: {', '.join(plan.unserved[:5])}"
        held = f"; in the way: {', '.join(plan.in_the_way[:5])}" if plan.in_the_way else ""
        print(words + held)
    then = [("next", "nodes render-gpus --to mig-manager")] if plan.cards and on_cluster else []
    if not on_cluster:
        then += [("next", each) for each in _cut_commands(plan)]
    words = f"{plural(len(plan.helped), 'job')} could start with these layouts"
    print_message(session, Message(words, tuple(then)))


def _cut_commands(plan: MigPlan) -> list[str]:
    """Return the commands that cut the GPUs of one machine as planned."""
    by_node: dict[str, list[str]] = {}
    for each in plan.cards:
        counts = ",".join(f"{name}:{count}" for name, count in sorted(Counter(each.then).items()))
        by_node.setdefault(each.node, []).append(f"--card {each.card}={counts or 'whole'}")
    return [
        f"{command_with('nodes configure-gpus', node)} {' '.join(cards)}" for node, cards in by_node.items()
    ]


def _slices(slices: Iterable[str]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in sorted(Counter(slices).items())) or "whole"
