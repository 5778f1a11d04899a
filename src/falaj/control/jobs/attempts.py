"""One attempt at a job, from staging to its recorded end: a thread that can be killed anywhere and started again."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Literal, TypedDict

from falaj.control.authorization import acting, requester
from falaj.control.jobs.agent import SOCKET, AgentServer, PlatformAgent
from falaj.control.jobs.context import ControllerContext, JobHost, one_line, remove_attempt
from falaj.control.jobs.environments import JobPython, packages_of, python_for
from falaj.control.jobs.outputs import upload_log, upload_outputs
from falaj.control.jobs.progress import ProgressMeter
from falaj.control.jobs.staging import stage
from falaj.errors import Conflict, FalajError, Fenced, Unavailable
from falaj.governance import objects
from falaj.governance.operations.caller import Caller
from falaj.governance.secrets.service import open_secrets
from falaj.ports.launcher import AttemptState, Launch
from falaj.records.names import ObjectId
from falaj.records.scheduling.accounting import ResourceUsage
from falaj.records.tracking import MetricPoint
from falaj.records.training.jobs import JobOutput, Verdict
from falaj.training import store
from falaj.training.logs import attempt_name
from falaj.training.moves import describe_request
from falaj.training.store import JobRow

log = logging.getLogger("falaj.controller")

POLL_S = 0.1
PROGRESS_S = 1.0
GRACE_S = {"cancelled": 10.0, "interrupted": 4.0, "lost": 0.0}
"""How long a job may take to end after SIGTERM. The platform itself has ten seconds to stop."""
LOST_S = 10.0
"""After so long, an attempt on a lost node is given up."""

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Temporary shortages of the platform, for which no job fails."""

StopReason = Literal["cancelled", "interrupted", "preempted", "lost"]


class Attempt:
    """The current attempt at the running job of `row`."""

    def __init__(self, context: ControllerContext, host: JobHost, row: JobRow) -> None:
        self._context, self._host, self._row = context, host, row
        self.job, self.number = row.id, row.attempt
        self.name = attempt_name(self.job, self.number)
        self._spec = row.spec
        self._directory = host.folder / self.job / str(self.number)
        self._agent_folder = host.folder / self.job / f"{self.number}.agent"
        self._requested: StopReason | None = "interrupted" if row.interrupting and not row.leaving else None
        self._sent: StopReason | None = None
        self._lost_node: str | None = None
        self.error: str | None = None
        self._progress, self._progress_at = ProgressMeter(), 0.0
        self._has_total = self._was_last = False
        with context.gate.database.read() as tx:
            found = objects.by_id(tx, self.job)
        self._workspace = ObjectId("") if found is None else found.workspace

    def request_stop(self, why: StopReason) -> None:
        """Stop the attempt soon; of two reasons, the one with the shorter grace period counts."""
        if self._requested is None or self._grace_s(why) < self._grace_s(self._requested):
            self._requested = why

    def lose(self, node: str) -> None:
        """Stop the attempt because its node is lost."""
        self._lost_node = node
        self.request_stop("lost")

    def _grace_s(self, why: StopReason) -> float:
        return self._host.preemption_grace_s if why == "preempted" else GRACE_S[why]

    def run(self) -> None:
        """Bring the attempt to its end, from whichever state it is in. Nothing is started twice."""
        try:
            self._record_end(*self._outcome())
        except Fenced:
            self._context.on_lost()
        except (Unavailable, Conflict) as error:
            self.error = error.message
            log.warning("attempt will be resumed", extra={"attempt": self.name, "reason": error.message})
        except Exception as error:
            self.error = f"{type(error).__name__}; see the controller's log"
            log.exception("attempt failed unexpectedly, will be resumed", extra={"attempt": self.name})

    def _outcome(self) -> tuple[Verdict, AttemptState]:
        try:
            state = self._start_and_wait()
        except (Fenced, Unavailable):
            raise
        except _Stopped:
            return self._verdict_before_start(), AttemptState("unknown")
        except FalajError as error:  # it cannot be started: refused, or something that it needs is gone
            return "failed", AttemptState("ended", reason=one_line(str(error)))
        except Exception as error:
            is_short = isinstance(error, OSError) and error.errno in SHORTAGES
            if is_short or self._host.launcher.state(self.name).phase != "unknown":
                raise
            log.exception("failed to prepare attempt", extra={"attempt": self.name})
            return "failed", AttemptState("ended", reason=f"it could not be prepared: {error}")
        return self._verdict(state), state

    def _start_and_wait(self) -> AttemptState:
        """Start the attempt unless it was started before, and wait for its end."""
        state = self._host.launcher.state(self.name)
        if state.phase in ("ended", "lost"):
            return state
        if state.phase == "unknown":
            self._check_stop()
            self._require_node()
            with acting(self._owner(), fence=self._context.fence):
                stage(
                    self._context.services,
                    self._context.gate.database,
                    self._row,
                    self._directory,
                    check_stop=self._check_stop,
                )
        with self._agent():
            if state.phase == "unknown":
                self._check_stop()
                self._context.require_lease()
                self._host.launcher.start(self._launch())
            return self._wait()

    def _require_node(self) -> None:
        """Raise Unavailable if a node of the attempt is missing: it may already run there."""
        there = {node.name for node in self._host.nodes()}
        away = [placed.node for placed in self._row.placements if placed.node not in there]
        if away:
            raise Unavailable(f"node {away[0]} is missing")

    def _wait(self) -> AttemptState:
        sent_at = time.monotonic()
        while True:
            state = self._host.launcher.state(self.name)
            if state.phase == "unknown":
                raise Unavailable(f"{self.name} was started, but does not run")
            if state.phase in ("ended", "lost"):
                return state
            if self._sent == "lost" and time.monotonic() - sent_at >= LOST_S:
                self._host.launcher.delete(self.name)
                return AttemptState("lost")
            if self._requested is not None and self._requested != self._sent:
                self._send_stop(self._requested)
                sent_at = time.monotonic()
            time.sleep(POLL_S)

    def _send_stop(self, why: StopReason) -> None:
        """Stop the attempt. That it is interrupted is recorded first, so that its end is not taken for a failure."""
        if why != "cancelled":
            self._context.update_job(self.job, interrupting=True)
        self._sent = why
        self._host.launcher.stop(self.name, grace_s=self._grace_s(why))

    def _verdict(self, state: AttemptState) -> Verdict:
        """Return the verdict. A requested stop counts only if it was sent before the attempt ended."""
        row = self._current_row()
        if row.cancelling:
            return "cancelled"
        if row.interrupting and state.stopped is not False:
            return _stop_verdict(row) or "interrupted"
        if state.node_restarted:
            return "interrupted"
        return "done" if state.phase == "ended" and state.exit_code == 0 else "failed"

    def _verdict_before_start(self) -> Verdict:
        """Return the verdict on an attempt that was stopped before it started."""
        match self._requested:
            case "cancelled":
                return "cancelled"
            case "preempted":
                return _stop_verdict(self._current_row()) or "interrupted"
            case _:
                return "interrupted"

    # ------------------------------------------------------------------------------------------------ end

    def _record_end(self, verdict: Verdict, state: AttemptState) -> None:
        """Upload its outputs and log, record them with the verdict, and remove its files."""
        reason, outputs = self._reason(verdict, state), tuple[JobOutput, ...]()
        notes: _Notes = {}
        try:
            with acting(self._owner(), fence=self._context.fence):
                if verdict == "done":
                    outputs = self._upload_outputs()
                notes = self._upload_notes()
        except (Fenced, Unavailable):
            raise
        except FalajError as error:
            verdict = "failed" if verdict == "done" else verdict
            reason = f"{reason + '; ' if reason else ''}its outputs could not be stored: {error}"
        with acting(self._context.service, fence=self._context.fence):
            self._context.services.jobs.finish(
                self.job,
                attempt=self.number,
                verdict=verdict,
                reason=reason and one_line(reason)[:2000],
                exit_code=state.exit_code,
                outputs=outputs,
                used=ResourceUsage(**asdict(state.used)),
                **notes,
            )
        remove_attempt(self._host, self.job, self.number)

    def _reason(self, verdict: Verdict, state: AttemptState) -> str | None:
        if verdict == "done":
            return None
        if verdict == "interrupted":
            why = f"node {self._lost_node} is lost" if self._lost_node else "the platform stopped"
            return f"interrupted: {'the machine went down' if state.node_restarted else why}"
        if verdict == "preempted":
            return f"preempted: it made room for job {self._current_row().evicted_for}"
        if verdict == "moved":
            return f"moved: it continues with {describe_request(self._current_row().spec)}"
        if verdict == "cancelled":
            return "cancelled" + (f": {state.reason}" if state.reason else "")
        return state.reason or f"it ended with exit code {state.exit_code}"

    def _current_row(self) -> JobRow:
        with self._context.gate.database.read() as tx:
            return store.job_row(tx, self.job)

    def _upload_outputs(self) -> tuple[JobOutput, ...]:
        sources = (self.job, self._row.run)
        folder = self._directory / "outputs"
        return upload_outputs(self._context.services, folder, workspace=self._workspace, sources=sources)

    def _upload_notes(self) -> _Notes:
        services, sources = self._context.services, (self.job, self._row.run)
        log_blob = upload_log(
            services, self._host.launcher, self.name, workspace=self._workspace, sources=sources
        )
        packages = packages_of(self._host.environments, self._spec.environment)
        listed = services.blobs.upload(iter([packages]), workspace=self._workspace, sources=sources)
        return {"log": log_blob, "environment": listed.id}

    # ---------------------------------------------------------------------------------------------- start

    def _launch(self) -> Launch:
        spec, directory = self._spec, self._directory
        target = [spec.script] if spec.script is not None else ["-m", str(spec.module)]
        python = self._python
        return Launch(
            attempt=self.name,
            directory=directory,
            command=[python.executable, "-u", *target, *spec.args],
            environment=self._environment(),
            framework=spec.framework,
            processes=spec.processes,
            processes_min=spec.processes_min,
            roles=spec.roles,
            cpus=spec.cpus,
            gpus=self._gpus(),
            gpu_milli=spec.gpu_milli,
            gpu_memory_bytes=spec.gpu_memory_bytes or 0,
            mps_directory=str(self._host.mps),
            memory_bytes=spec.memory_bytes,
            disk_bytes=spec.disk_bytes,
            secrets=self._secrets(),
            network=spec.network,
            readable=(self._agent_folder, *python.readable),
            hidden=self._host.hidden,
            timeout_s=None if spec.timeout is None else spec.timeout.total_seconds(),
            hang_s=None if spec.hang_after is None else spec.hang_after.total_seconds(),
            grace_s=GRACE_S["cancelled"],
            nsys=spec.nsys,
        )

    def _environment(self) -> dict[str, str]:
        directory = self._directory
        own = {
            "FALAJ_JOB": self.job,
            "FALAJ_ATTEMPT": str(self.number),
            "FALAJ_INPUTS": str(directory / "inputs"),
            "FALAJ_OUTPUTS": str(directory / "outputs"),
            "FALAJ_AGENT": str(self._agent_folder / SOCKET),
        }
        path = os.pathsep.join([self._python.programs, os.defpath])
        usual = {"HOME": str(directory), "PATH": path, "LC_ALL": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
        return usual | self._spec.env | own | self._python.variables(self._agent_folder, self._spec.env)

    @property
    def _python(self) -> JobPython:
        return python_for(self._host.environments, self._spec.environment)

    def _secrets(self) -> dict[str, str]:
        """Return the values of the secrets that the job's owner may use now; they are read at each start."""
        if not self._spec.secrets:
            return {}
        with acting(self._owner(), fence=self._context.fence):
            return open_secrets(self._context.services.secrets, self._spec.secrets, workspace=self._workspace)

    def _gpus(self) -> tuple[str, ...]:
        """Return the UUIDs of the allocated GPUs or slices."""
        return tuple(gpu for placed in self._row.placements for gpu in placed.gpus)

    @contextmanager
    def _agent(self) -> Iterator[None]:
        context = self._context
        agent = PlatformAgent(
            context.services,
            self._row,
            workspace=self._workspace,
            owner=self._owner,
            service=context.service,
            fence=context.fence,
            may_continue=lambda: self._sent is None,
            on_progress=self._on_progress,
            on_metrics=self._on_metrics,
            limits=self._host.limits,
        )
        server = AgentServer(self._agent_folder, agent, home=self._directory, on_fenced=context.on_lost)
        try:
            yield
        finally:
            server.close()

    def _on_progress(self, step: int, total: int) -> None:
        self._progress.advance(step, total)
        is_last = step >= total > 0
        self._record_progress(is_due=not self._has_total or (is_last and not self._was_last))
        self._has_total, self._was_last = True, is_last

    def _on_metrics(self, points: Sequence[MetricPoint]) -> None:
        self._progress.measure(points)
        self._record_progress(is_due=False)

    def _record_progress(self, *, is_due: bool) -> None:
        """Record the progress if it `is_due`, or some time after the last record."""
        progress, now = self._progress.progress(), time.monotonic()
        if progress is not None and (is_due or now - self._progress_at >= PROGRESS_S):
            self._progress_at = now
            self._context.update_job(self.job, progress=progress.model_dump(mode="json"))

    def _owner(self) -> Caller:
        """Return the requester of the job, authorized anew."""
        with self._context.gate.database.read() as tx:
            return requester(tx, self._row, origin=f"job:{self.job}")

    def _check_stop(self) -> None:
        if self._requested is not None:
            raise _Stopped


def _stop_verdict(row: JobRow) -> Verdict | None:
    """Return whether the job was preempted or moved; None if neither."""
    if not row.leaving:
        return None
    return "moved" if row.evicted_for is None else "preempted"


class _Notes(TypedDict, total=False):
    """Blobs with what the platform records about an attempt."""

    log: ObjectId
    environment: ObjectId


class _Stopped(Exception):
    """The attempt was to stop before it was started."""
