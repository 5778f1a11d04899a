"""`falaj queues render`, `diff` and `apply`: the queues as objects of Kueue in a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.output.messages import Message, print_message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import plural, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.scheduling.kueue import ObjectDrift, QueueDrift

To = Annotated[str, typer.Option(metavar="SYSTEM", help="The system that then decides: kueue.")]

STATES = {
    "missing": "is missing",
    "changed": "was changed",
    "extra": "is not rendered any more",
    "foreign": "has the same name and is not the platform's: rename it, or set kubernetes.prefix",
    "waiting": "waits for its namespace",
}
DONE = {"missing": "created", "changed": "put back", "extra": "deleted"}


def render(session: Session, *, to: To = "kueue") -> None:
    """Print the queues as objects of Kueue, in YAML: ResourceFlavors, Cohorts, ClusterQueues, LocalQueues …"""
    given: Any = {"to": to}
    parsing.check(all_operations()["queues.render"], given)
    with session.platform() as platform:
        found = platform.queues.render(**given)
    if session.json:
        show(found, as_json=True)
        return
    import yaml

    print(yaml.safe_dump_all(found.manifests, sort_keys=False, width=120), end="")


def diff(session: Session, *, to: To = "kueue") -> None:
    """Show how the objects of Kueue in the cluster differ from the queues, object by object. Nothing is changed."""
    given: Any = {"to": to}
    parsing.check(all_operations()["queues.diff"], given)
    with session.platform() as platform:
        found = platform.queues.diff(**given)
    session.show(found, lambda drift: _print_drift(session, drift))


def apply(session: Session, *, to: To = "kueue") -> None:
    """Make the objects of Kueue in the cluster as the queues say. Objects of others are left alone."""
    given: Any = {"to": to}
    parsing.check(all_operations()["queues.apply"], given)
    with session.platform() as platform:
        done = platform.queues.apply(**given)
    if session.json:
        show(done, as_json=True)
        return
    _print_objects(done.changed, DONE)
    _print_objects(done.left, STATES)
    counts = Counter(DONE[each.state] for each in done.changed)
    words = ", ".join(f"{count} {word}" for word, count in counts.items()) or "nothing changed"
    print_message(session, Message(f"{words}; as rendered before: {plural(done.same, 'object')}"))


def _print_drift(session: Session, drift: QueueDrift) -> None:
    _print_objects(drift.objects, STATES)
    repairable = [each for each in drift.objects if each.state in DONE]
    then = (("fix", f"queues apply --to {drift.to}"),) if repairable else ()
    counts = f"different: {plural(len(drift.objects), 'object')}; as rendered: {plural(drift.same, 'object')}"
    print_message(session, Message(counts, then))


def _print_objects(objects: Iterable[ObjectDrift], words: dict[str, str]) -> None:
    for each in objects:
        where = f" in {each.namespace}" if each.namespace else ""
        print(printable(f"{each.kind} {each.name}{where} {words[each.state]}"))
        for field in each.fields:
            print(printable(f"  {field.field}: {field.cluster or 'not set'} → {field.rendered or 'not set'}"))
