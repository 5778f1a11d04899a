"""Past jobs in the accounts of a platform, and the processes that replay them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from falaj.control.workflows.store import work_row
from falaj.control.workflows.what_if import replay_what_if
from falaj.governance import objects
from falaj.ports.metadata import Database
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, ObjectId, PrincipalId, new_id
from falaj.records.record import utc_now
from falaj.records.scheduling.accounting import ResourceUsage
from falaj.records.scheduling.snapshot import Placement, Request, Resources
from falaj.scheduling.accounting.accounts import QueueAccounts
from falaj.scheduling.service import Queues
from falaj.scheduling.simulator.replay_process import PROGRAM
from polling import eventually
from processes import children

EACH = timedelta(minutes=10)


def add_past_jobs(database: Database, accounts: QueueAccounts, jobs: int, *, queues: tuple[str, ...]) -> None:
    """Record `jobs` jobs of ten minutes on one CPU, submitted one a minute; none of them waited."""
    begin = utc_now() - timedelta(minutes=jobs + 60)
    with database.write() as tx:
        home = objects.resolve(tx, "default", kind="workspace", workspace=ROOT)
        for number in range(jobs):
            came = begin + timedelta(minutes=number)
            ident = new_id("job")
            objects.create(
                tx,
                StoredObject(
                    id=ident,
                    workspace=home.id,
                    kind="job",
                    name=ident,
                    owner=PrincipalId(home.owner or ""),
                    created_at=came,
                ),
            )
            request = Request(
                job=ident,
                queue=queues[number % len(queues)],
                replicas=1,
                each=Resources(cpus=1),
                submitted_at=came,
                workspace=home.id,
            )
            accounts.begin(
                tx,
                request,
                attempt=1,
                user=ObjectId(home.owner or ""),
                placements=(Placement(replica=0, node="here"),),
                gpu_models=(),
                borrows=False,
                now=came,
            )
            accounts.end(tx, ident, attempt=1, verdict="done", used=ResourceUsage(), now=came + EACH)


# ------------------------------------------------------------------------------------------- replaying


class ImmediateWorkflow:
    """Runs steps and waits at once, and collects reports."""

    def __init__(self, workflow: str) -> None:
        self.workflow = workflow
        self.reports: list[tuple[str, int, int | None]] = []

    def run(self, name: str, body: Callable[[], Any]) -> Any:
        return body()

    def wait(
        self, name: str, poll: Callable[[], Any], *, every_s: float = 1.0, longest_s: float = 10.0
    ) -> Any:
        return eventually(poll)

    def undo(self, name: str, body: Callable[[], Any]) -> Any:
        return body()

    def report(self, words: str, *, done: int = 0, of: int | None = None) -> None:
        self.reports.append((words, done, of))


def replay_now(queue: Queues, work: str) -> ImmediateWorkflow:
    """Execute `work` as the controller does."""
    with queue.gate.database.read() as tx:
        given = work_row(tx, work).input
    walk, services = ImmediateWorkflow(work), SimpleNamespace(queues=queue)
    replay_what_if(services, walk, given)  # type: ignore[arg-type]
    return walk


def replay_processes(parent: int) -> list[int]:
    """Return the processes of `parent` that run a replay."""
    return children(parent, PROGRAM)
