"""Operations on jobs: for users, and for the controller that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

from pydantic import AwareDatetime, Field, StringConstraints

from falaj.errors import Conflict, InvalidInput
from falaj.governance.bootstrap import count_users
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ByteStream, Mode, operation
from falaj.governance.operations.pagination import visible_page
from falaj.governance.record_stream import stream_changes
from falaj.governance.secrets.service import require_secrets
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import BlobRef, Name, WorkspaceRef, new_id
from falaj.records.scheduling.accounting import ResourceUsage
from falaj.records.scheduling.snapshot import AtLeastOne, Explanation, Node, Request
from falaj.records.training.jobs import (
    MOST_NODES,
    AttemptNumber,
    Checkpoint,
    CheckpointCount,
    Job,
    JobMove,
    JobRef,
    JobSpec,
    JobState,
    Outputs,
    PartBlobs,
    Placements,
    SaveName,
    Verdict,
    Words,
)
from falaj.training import store
from falaj.training.admission import require_admissible, require_job_limit
from falaj.training.attempts import AttemptRecorder, cancel_reason
from falaj.training.checkpoints import commit_checkpoint
from falaj.training.dependencies import Accounts, BlobSource, ExecutionBackend, Scheduler, TrackedRuns
from falaj.training.inputs import (
    require_token_scope,
    require_volume_zones,
    require_zone,
    resolve_inputs,
    volume_label,
)
from falaj.training.logs import LogReader
from falaj.training.moves import MoveTarget, move_job, moved_record
from falaj.training.queue import QueueReader, is_due, request_for, request_of
from falaj.training.retry import JobRetry, requester_columns
from falaj.training.runs import start_run
from falaj.training.runtime.checkpointing.storage.store import Retention

Offset = Annotated[int, Field(ge=0, le=2**62)]
Step = Annotated[int, Field(ge=0, le=2**62)]
HomeIdent = Annotated[str, StringConstraints(max_length=100)]
FenceSeconds = Annotated[int, Field(ge=1, le=2**31)]
ExitCode = Annotated[int, Field(ge=-(2**31), le=2**31)]
Hosts = Annotated[tuple[Name, ...], Field(max_length=4096)]


class Jobs:
    """Jobs run code on the platform's nodes, with inputs from the platform; all that they do is recorded."""

    def __init__(
        self,
        gate: Gate,
        *,
        runs: TrackedRuns,
        scheduler: Scheduler,
        backend: ExecutionBackend,
        blobs: BlobSource,
        accounts: Accounts,
        wanted: Callable[[], None],
        unfinished_limit: int = 10_000,
        waiting_limit: int | None = None,
        can_grow: bool = False,
    ) -> None:
        """`wanted` is called when there may be a job to start.

        `waiting_limit` is how many jobs of a queue wait in Kueue at once; none where Kueue does not decide. `can_grow`
        says that autoscalers are asked for nodes.
        """
        self._can_grow = can_grow
        self.gate = gate
        self._runs = runs
        self._scheduler = scheduler
        self._backend = backend
        self._blobs = blobs
        self._accounts = accounts
        self._wanted = wanted
        self._unfinished_limit = unfinished_limit
        self._waiting_limit = waiting_limit
        self._attempts = AttemptRecorder(runs, blobs, accounts, backend)
        self.queue = QueueReader(accounts)
        self.stored = blobs

    @operation("jobs.submit", resource="workspace", mode=Mode.LATE)
    def submit(
        self, spec: JobSpec, *, code: BlobRef | None = None, workspace: WorkspaceRef | None = None
    ) -> Job:
        """Queue a job. `code` is an uploaded tar.gz that has the script; it is kept from then on.

        You must be allowed to read every input; their restrictions flow into the job and all that it makes.
        """
        call = current_call()
        nodes = self._fitting_nodes(call, spec)
        _require_code(spec, code)
        volumes = self._backend.volumes(spec.volumes, call.target.name)
        self._backend.require_storage(volumes, call.target.name, disk_bytes=spec.disk_bytes)
        own = volume_label(volumes, self.gate.zones)

        def publish() -> Job:
            home = call.target
            require_job_limit(call.tx, home.id, limit=self._unfinished_limit)
            inputs = self._take_inputs(call, home, spec, nodes)
            require_secrets(self.gate, call, spec.secrets, workspace=home)
            new = call.create("job", workspace=home, own=own)
            require_volume_zones(new.label, volumes, self.gate.zones)
            archive = call.object("code") if code is not None else None
            if archive is not None:
                self._blobs.keep(call.tx, self._blobs.facts(call.tx, archive.id), now=call.now)
            data_zones = frozenset(found.zone for found in inputs.values() if found.zone is not None)
            request = request_of(new, spec, data_zones=data_zones)
            pinned = {name: found.id for name, found in inputs.items()}
            values = {
                "spec": spec.model_dump(mode="json"),
                "request": request.model_dump(mode="json", exclude_defaults=True),
                "queue": spec.queue,
                "inputs": pinned,
                "code": None if archive is None else archive.id,
                "run": start_run(self._runs, call, home, new.id, spec, pinned),
                **requester_columns(call),
            }
            store.add_job(call.tx, new, values)
            return store.job_record(new, store.job_row(call.tx, new.id))

        job = self.gate.commit(call, publish)
        self._wanted()
        return job

    @operation("jobs.show", resource="job", mode=Mode.READ)
    def show(self, job: JobRef) -> Job:
        """Show a job: its state, progress, outputs, and how it ended."""
        return self._record()

    @operation("jobs.list", resource="workspace", mode=Mode.READ)
    def list(
        self,
        *,
        state: JobState | None = None,
        workspace: WorkspaceRef | None = None,
        after: Cursor = "",
        limit: PageSize = 100,
    ) -> Page[Job]:
        """List the jobs of a workspace, newest first."""
        call = current_call()
        page = visible_page(
            self.gate,
            lambda visible, position, count: store.list_jobs(
                call.tx, call.target.id, [*visible], state=state, before=position, limit=count
            ),
            after=after,
            limit=limit,
            kinds=["job"],
            workspace=call.target.id,
        )
        rows = store.job_rows(call.tx, [found.id for found, _ in page.items])
        shown = (store.abbreviate(store.job_record(found, rows[found.id])) for found, _ in page.items)
        return Page(items=tuple(shown), next=page.next)

    @operation("jobs.wait", resource="job", mode=Mode.READ)
    def wait(self, job: JobRef) -> Iterator[Job]:
        """Stream the job at each change until it ends, with heartbeats; the last record says how it ended."""
        self._wanted()
        target = current_call().target
        return stream_changes(
            self.gate,
            lambda tx: store.job_record(target, store.job_row(tx, target.id)),
            has_ended=lambda job: job.state.ended,
        )

    @operation("jobs.logs", resource="job", mode=Mode.FREE)
    def logs(self, job: JobRef, *, follow: bool = False, offset: Offset = 0) -> ByteStream:
        """Stream the log of the newest attempt from a byte offset; with `follow`, until the job ends."""
        if follow:
            self._wanted()
        reader = LogReader(self.gate, self._backend, self._blobs, current_call().target.id)
        return reader.stream(follow=follow, offset=offset)

    @operation("jobs.explain", resource="job", mode=Mode.READ)
    def explain(self, job: JobRef) -> Explanation:
        """Explain why a job waits: the binding constraint, its position, what would start it, its expected start.

        For a running job: since when it runs, and how the attempt before ended.
        """
        call = current_call()
        found, now = self._record(), call.now
        if found.state.ended:
            raise Conflict(
                f"job {found.id} has ended: {found.state}" + (f", {found.reason}" if found.reason else "")
            )
        row = store.job_row(call.tx, found.id)
        pause = row.not_before
        queue = self.queue.snapshot(call.tx, self._backend.nodes(), now=now)
        if pause is not None and not is_due(pause, now=now):
            words = f"pauses until {pause:%Y-%m-%d %H:%M:%S %Z} after a failed attempt; {found.reason}"
            of = len(queue.attempts)
            return Explanation(job=found.id, state="waiting", words=words, of=of, expected_start=pause)
        if row.handed_over or (found.state is JobState.QUEUED and self._waiting_limit is not None):
            limit = self._waiting_limit or 0
            return self._scheduler.explain_handover(
                queue.snapshot, queue.handed_over, found.id, said=found.reason, limit=limit
            )
        explained, before = self._scheduler.explain(queue.snapshot, found.id), None
        if found.state is JobState.RUNNING:
            before = store.describe_ending(call.tx, found.id, found.attempt - 1)
        return explained.model_copy(update={"words": f"{explained.words}; {before}"}) if before else explained

    @operation("jobs.cancel", resource="job", confirm=True)
    def cancel(self, job: JobRef, *, reason: Words | None = None) -> Job:
        """Cancel a job: a queued one leaves the queue, a running one is asked to end and killed if it does not.

        A `reason` that is given is shown as that of the job.
        """
        call = current_call()
        row = store.lock_job(call.tx, call.target.id)
        if row.state.ended:
            raise Conflict(f"job {call.target.id} has ended already: {row.state}")
        given = None if reason is None else cancel_reason(reason)
        if row.has_attempt:
            store.update_job(
                call.tx, call.target.id, cancelling=True, **({} if given is None else {"reason": given})
            )
        else:
            by = f"cancelled by {call.caller.name} before it started"
            self._attempts.end(call, row, JobState.CANCELLED, given or by)
        return self._record()

    @operation("jobs.retry", resource="job")
    def retry(self, job: JobRef) -> Job:
        """Queue a failed or cancelled job again, on your behalf; it resumes from its checkpoints, as a new run.

        It is refused where no node could run it any more. The new run keeps the resume history of the run before, and
        names that run in its parameter job.goes_on_from.
        """
        call = current_call()
        dependencies = self._runs, self._scheduler, self._backend, self._accounts
        JobRetry(self.gate, *dependencies, self._unfinished_limit, self._can_grow).requeue(call)
        self._wanted()
        return self._record()

    @operation("jobs.move", resource="job")
    def move(
        self,
        job: JobRef,
        *,
        to: Name | None = None,
        pool: Name | None = None,
        nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] | None = None,
        gpus: Annotated[int, Field(ge=0, le=1024)] | None = None,
        cpus: AtLeastOne | None = None,
    ) -> JobMove:
        """Move a job to cpu or gpu, to a pool, or to more or fewer nodes. A running job saves a checkpoint and stops.

        It is queued again with its old place in the queue, and the move is not a failure. A job without checkpoints
        starts over.
        """
        call = current_call()
        there, queues = self._backend.nodes(), self._accounts.queues(call.tx, now=call.now)
        move_job(call, MoveTarget(to, pool, gpus, cpus, nodes), there, queues, self._scheduler)
        self._wanted()
        return moved_record(call, self._record())

    @operation("jobs.checkpoints", resource="job", mode=Mode.READ)
    def checkpoints(self, job: JobRef) -> tuple[Checkpoint, ...]:
        """List the checkpoints of a job, newest first; their bytes are in blobs."""
        return tuple(store.checkpoints_of(current_call().tx, current_call().target.id))

    @operation("jobs.begin", resource="job", allow=Role.OPERATOR, internal=True, emits=True)
    def begin(
        self,
        job: JobRef,
        *,
        attempt: AttemptNumber,
        placements: Placements | None = None,
        borrows: bool = False,
        decided: Request | None = None,
        home: HomeIdent | None = None,
        fence_s: FenceSeconds | None = None,
        hosts: Hosts = (),
        since: AwareDatetime | None = None,
    ) -> Job:
        """Record that an attempt begins, unless the job's request is no longer the one that was `decided`.

        It runs on the machine of `home`, and stops by itself after `fence_s` without renewal. Without `placements` it
        is one that was handed over to a cluster, and runs on `hosts` there `since` then.
        """
        call = current_call()
        if placements is None:
            self._attempts.start_handed_over(call, attempt, hosts, since=since)
        else:
            self._attempts.begin(
                call,
                attempt,
                placements,
                borrows=borrows,
                decided=decided,
                home=home,
                fence_s=fence_s,
            )
        return self._record()

    @operation("jobs.hand_over", resource="job", allow=Role.OPERATOR, internal=True)
    def hand_over(
        self,
        job: JobRef,
        *,
        attempt: AttemptNumber,
        decided: Request | None = None,
        home: HomeIdent | None = None,
        fence_s: FenceSeconds | None = None,
    ) -> Job:
        """Record an attempt that waits in the queue of a cluster, which decides when it runs; the job stays queued.

        The controller calls this, and `jobs.begin` once its pods run.
        """
        self._attempts.hand_over(current_call(), attempt, decided=decided, home=home, fence_s=fence_s)
        return self._record()

    @operation("jobs.preempt_for", resource="job", allow=Role.OPERATOR, internal=True, emits=True)
    def preempt_for(self, job: JobRef, *, leaving: Annotated[tuple[JobRef, ...], Field(min_length=1)]) -> Job:
        """Preempt the jobs in `leaving` for a queued job, which gets a claim to their resources.

        They save checkpoints, go back to their queues and resume later. The controller calls this.
        """
        call = current_call()
        self._attempts.make_room(call, [found.id for found in call.referred["leaving"]])
        return self._record()

    @operation("jobs.finish", resource="job", allow=Role.OPERATOR, internal=True, emits=True)
    def finish(
        self,
        job: JobRef,
        *,
        attempt: AttemptNumber,
        verdict: Verdict,
        reason: Words | None = None,
        exit_code: ExitCode | None = None,
        outputs: Outputs = (),
        log: BlobRef | None = None,
        environment: BlobRef | None = None,
        image: Words | None = None,
        used: ResourceUsage | None = None,
    ) -> Job:
        """Record how an attempt ended, and publish its outputs. The controller calls this."""
        call = current_call()
        self._attempts.settle(
            call,
            attempt,
            verdict,
            reason=reason,
            exit_code=exit_code,
            outputs=outputs,
            log=None if log is None else call.object("log").id,
            environment=None if environment is None else call.object("environment").id,
            image=image,
            used=used or ResourceUsage(),
        )
        job_now = self._record()
        call.event_data |= {"state": job_now.state, "attempt": attempt, "reason": reason}
        return job_now

    @operation("jobs.save_checkpoint", resource="job", allow=Role.OPERATOR, internal=True)
    def save_checkpoint(
        self,
        job: JobRef,
        *,
        attempt: AttemptNumber,
        step: Step,
        save: SaveName,
        manifest: BlobRef,
        parts: PartBlobs,
        keep: CheckpointCount = 3,
        best: Step | None = None,
    ) -> Checkpoint:
        """Commit uploaded parts as the checkpoint of a step; the newest `keep` stay, and `best`.

        The controller calls this.
        """
        call = current_call()
        return commit_checkpoint(
            call,
            self._blobs,
            [call.object("manifest"), *call.referred["parts"]],
            attempt=attempt,
            step=step,
            save=save,
            retention=Retention(keep, best),
        )

    def _record(self) -> Job:
        call = current_call()
        return store.job_record(call.target, store.job_row(call.tx, call.target.id))

    def _fitting_nodes(self, call: Call, spec: JobSpec) -> tuple[Node, ...]:
        """Return the nodes, or raise InvalidInput if the job could not run on them even if they were idle."""
        with self.gate.database.read() as tx:
            users, queues = count_users(tx), self._accounts.queues(tx, now=call.now)
            self._accounts.require_open(tx, spec.queue, call.target.id)
        self._backend.require_isolation(users=users)
        if spec.environment is not None:
            self._backend.require_environment(spec.environment)
        if spec.network:
            self._backend.require_network()
        nodes = self._backend.nodes()
        asked = request_for(new_id("job"), spec, workspace=call.target.id, submitted_at=call.now)
        require_admissible(self._scheduler, spec, asked, nodes, queues, can_grow=self._can_grow)
        return nodes

    def _take_inputs(
        self, call: Call, home: StoredObject, spec: JobSpec, nodes: tuple[Node, ...]
    ) -> dict[str, StoredObject]:
        """Return the inputs, which become sources of the call; Denied if no node may compute on them."""
        inputs = resolve_inputs(self.gate, call, spec.inputs)
        call.referred["inputs"] = [*inputs.values()]
        for archive in call.referred["code"]:
            self.gate.require(call, "blobs.read", archive)
        self.gate.require(call, "blobs.upload", home)
        require_token_scope(call.caller)
        require_zone(self.gate, call, home, nodes)
        return inputs


def _require_code(spec: JobSpec, code: str | None) -> None:
    if spec.asked is not None:
        raise InvalidInput.at("spec.asked", allowed="nothing: it is filled in when a job is moved")
    if spec.script is not None and code is None:
        raise InvalidInput.at("code", allowed=f"the blob of a tar.gz that has {spec.script}")
