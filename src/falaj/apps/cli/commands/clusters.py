"""`falaj clusters`: the clusters that jobs run on, as their administrators see them."""

from __future__ import annotations

from typing import Annotated

import typer

from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.errors import FAILED
from falaj.apps.cli.output.messages import Message, print_message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import plural, printable
from falaj.apps.cli.session import Session
from falaj.records.scheduling.clusters import ClusterNamespaceSync, NamespaceState

PRESENTATION = Presentation()

OneCluster = Annotated[str | None, typer.Option("--cluster", metavar="NAME", help="One of several clusters.")]
LEFT = "no workspace has it any more; kubectl delete namespace removes it with all that is in it"


@PRESENTATION.command("render")
def render(session: Session, cluster: OneCluster = None) -> None:
    """Print what an administrator applies before the first job, in YAML: account, rights and namespaces."""
    with session.platform() as platform:
        found = platform.clusters.render(cluster=cluster)
    if session.json:
        show(found, as_json=True)
        return
    import yaml

    print(yaml.safe_dump_all(found.manifests, sort_keys=False, width=120), end="")


@PRESENTATION.command("apply")
def apply(session: Session, cluster: OneCluster = None) -> int:
    """Make the namespaces of all workspaces as they are to be, and delete none; exit 1 if one is refused."""
    with session.platform() as platform:
        done = platform.clusters.apply(cluster=cluster)
    session.show(done, lambda made: _print_all(session, made))
    return FAILED if any(each.state == "refused" for each in done.namespaces) else 0


def _print_all(session: Session, done: ClusterNamespaceSync) -> None:
    named = any(each.cluster for each in done.namespaces)
    rows = [[*([each.cluster or "-"] if named else []), *_row(each)] for each in done.namespaces]
    show_rows([*(["cluster"] if named else []), "workspace", "namespace", "state", "reason"], rows)
    kept = sum(each.state == "kept" for each in done.namespaces)
    refused = [each for each in done.namespaces if each.state == "refused"]
    then = (("see", "doctor"),) if refused else ()
    words = (
        f"{plural(kept, 'namespace')} as it is to be" if kept == 1 else f"{kept} namespaces as they are to be"
    )
    print_message(session, Message(words + (f"; {len(refused)} refused" if refused else ""), then))


def _row(found: NamespaceState) -> list[str]:
    reason = LEFT if found.state == "extra" else found.reason or "-"
    return [printable(each) for each in (found.workspace, found.namespace, found.state, reason)]
