"""One attempt at a job, from its directory to its outcome: a thread that can be killed anywhere and begun again."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

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
from falaj.records.training.jobs import JobOutput, JobSpec, Verdict
from falaj.training import store
from falaj.training.logs import attempt_name
from falaj.training.moves import describe_request

log = logging.getLogger("falaj.controller")

LOOK_EVERY_S = 0.1
PROGRESS_EVERY_S = 1.0
GRACE_S = {"cancelled": 10.0, "interrupted": 4.0, "lost": 0.0}
"""How long a job may take to end when it is asked to. The platform itself is given ten seconds to stop."""
LOST_S = 10.0
"""After so long, an attempt on a lost node that does not end is forgotten."""

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""What the platform lacks for a while, and no job is to blame for."""

Asked = Literal["cancelled", "interrupted", "preempted", "lost"]


class Attempt:
    """The attempt that the row of a running job tells of."""

    def __init__(self, context: ControllerContext, host: JobHost, row: Any) -> None:
        self._context, self._host, self._row = context, host, row
        self.job: ObjectId = row["id"]
        self.number: int = row["attempt"]
        self.name = attempt_name(self.job, self.number)
        self._spec = JobSpec.model_validate(row["spec"])
        self._directory = host.folder / self.job / str(self.number)
        self._agent_folder = host.folder / self.job / f"{self.number}.agent"
        self._asked: Asked | None = "interrupted" if row["interrupting"] and not row["leaving"] else None
        self._told: Asked | None = None
        self._lost_node: str | None = None
        self.trouble: str | None = None
        self._pace, self._progress_at = ProgressMeter(), 0.0
        self._has_total = self._was_last = False
        with context.gate.database.read() as tx:
            found = objects.by_id(tx, self.job)
        self._workspace = ObjectId("") if found is None else found.workspace

    def ask(self, why: Asked) -> None:
        """Have it end soon; of two wishes, the more urgent one counts."""
        if self._asked is None or self._grace_s(why) < self._grace_s(self._asked):
            self._asked = why

    def lose(self, node: str) -> None:
        """The node that it runs on is lost."""
        self._lost_node = node
        self.ask("lost")

    def _grace_s(self, why: Asked) -> float:
        return self._host.preemption_grace_s if why == "preempted" else GRACE_S[why]

    def live(self) -> None:
        """Bring the attempt to its end, from wherever it stands. Whatever happens, nothing is started twice."""
        try:
            self._settle(*self._outcome())
        except Fenced:
            self._context.on_lost()
        except (Unavailable, Conflict) as error:
            self.trouble = error.message
            log.warning("an attempt is taken up again", extra={"attempt": self.name, "reason": error.message})
        except Exception as error:
            self.trouble = f"{type(error).__name__}; the controller's log says more"
            log.exception("an attempt broke; it is taken up again", extra={"attempt": self.name})

    def _outcome(self) -> tuple[Verdict, AttemptState]:
        try:
            state = self._run()
        except (Fenced, Unavailable):
            raise
        except _GivenUp:
            return self._verdict_asked(), AttemptState("unknown")
        except FalajError as error:  # it cannot be started: refused, or something that it needs is gone
            return "failed", AttemptState("ended", reason=one_line(str(error)))
        except Exception as error:
            is_short = isinstance(error, OSError) and error.errno in SHORTAGES
            if is_short or self._host.launcher.state(self.name).phase != "unknown":
                raise
            log.exception("an attempt could not be prepared", extra={"attempt": self.name})
            return "failed", AttemptState("ended", reason=f"it could not be prepared: {error}")
        return self._verdict(state), state

    def _run(self) -> AttemptState:
        """Start the attempt if it never was, and wait for its end."""
        state = self._host.launcher.state(self.name)
        if state.phase in ("ended", "lost"):
            return state
        if state.phase == "unknown":
            self._go_on()
            self._require_node()
            with acting(self._owner(), fence=self._context.fence):
                stage(
                    self._context.services,
                    self._context.gate.database,
                    self._row,
                    self._directory,
                    go_on=self._go_on,
                )
        with self._agent():
            if state.phase == "unknown":
                self._go_on()
                self._context.require_lease()
                self._host.launcher.start(self._launch())
            return self._wait()

    def _require_node(self) -> None:
        """It may run on a machine that is not seen from here just now: then it must not be started here as well."""
        there = {node.name for node in self._host.nodes()}
        away = [placed["node"] for placed in self._row["placements"] if placed["node"] not in there]
        if away:
            raise Unavailable(f"node {away[0]} is not there")

    def _wait(self) -> AttemptState:
        told_at = time.monotonic()
        while True:
            state = self._host.launcher.state(self.name)
            if state.phase == "unknown":
                raise Unavailable(f"{self.name} was started, and did not begin")
            if state.phase in ("ended", "lost"):
                return state
            if self._told == "lost" and time.monotonic() - told_at >= LOST_S:
                self._host.launcher.delete(self.name)
                return AttemptState("lost")
            if self._asked is not None and self._asked != self._told:
                self._tell(self._asked)
                told_at = time.monotonic()
            time.sleep(LOOK_EVERY_S)

    def _tell(self, why: Asked) -> None:
        """Have it end. That it did not fail, and is not done, is written down before anybody hears of it."""
        if why != "cancelled":
            self._context.note(self.job, interrupting=True)
        self._told = why
        self._host.launcher.stop(self.name, grace_s=self._grace_s(why))

    def _verdict(self, state: AttemptState) -> Verdict:
        """What it was asked counts only if it was told: it may have come to its end before."""
        with self._context.gate.database.read() as tx:
            row = store.job_row(tx, self.job)
        if row["cancelling"]:
            return "cancelled"
        if row["interrupting"] and state.stopped is not False:
            return _leaving(row) or "interrupted"
        if state.node_restarted:
            return "interrupted"
        return "done" if state.phase == "ended" and state.exit_code == 0 else "failed"

    def _verdict_asked(self) -> Verdict:
        """Of an attempt that was given up before it started."""
        match self._asked:
            case "cancelled":
                return "cancelled"
            case "preempted":
                with self._context.gate.database.read() as tx:
                    return _leaving(store.job_row(tx, self.job)) or "interrupted"
            case _:
                return "interrupted"

    # -------------------------------------------------------------------------------------------- its end

    def _settle(self, verdict: Verdict, state: AttemptState) -> None:
        """Upload what it left, publish it together with the outcome, and clear up."""
        reason, outputs = self._reason(verdict, state), tuple[JobOutput, ...]()
        kept: dict[str, ObjectId] = {}
        try:
            with acting(self._owner(), fence=self._context.fence):
                if verdict == "done":
                    outputs = self._upload_outputs()
                kept = self._upload_notes()
        except (Fenced, Unavailable):
            raise
        except FalajError as error:
            verdict = "failed" if verdict == "done" else verdict
            reason = f"{reason + '; ' if reason else ''}what it left could not be kept: {error}"
        with acting(self._context.service, fence=self._context.fence):
            self._context.services.jobs.finish(
                self.job,
                attempt=self.number,
                verdict=verdict,
                reason=reason and one_line(reason)[:2000],
                exit_code=state.exit_code,
                outputs=outputs,
                used=ResourceUsage(**asdict(state.used)),
                **kept,
            )
        self.clear()

    def clear(self) -> None:
        """Remove what is left of an attempt that is settled."""
        remove_attempt(self._host, self.job, self.number)

    def _reason(self, verdict: Verdict, state: AttemptState) -> str | None:
        if verdict == "done":
            return None
        if verdict == "interrupted":
            why = f"node {self._lost_node} is lost" if self._lost_node else "the platform stopped"
            return f"interrupted: {'the machine went down' if state.node_restarted else why}"
        if verdict == "preempted":
            return f"preempted: it made room for job {self._evicted_for()}"
        if verdict == "moved":
            return f"moved: it goes on with {self._asks_now()}"
        if verdict == "cancelled":
            return "cancelled" + (f": {state.reason}" if state.reason else "")
        return state.reason or f"it ended with exit code {state.exit_code}"

    def _evicted_for(self) -> str:
        with self._context.gate.database.read() as tx:
            return str(store.job_row(tx, self.job)["evicted_for"])

    def _asks_now(self) -> str:
        with self._context.gate.database.read() as tx:
            return describe_request(JobSpec.model_validate(store.job_row(tx, self.job)["spec"]))

    def _upload_outputs(self) -> tuple[JobOutput, ...]:
        sources = (self.job, self._row["run"])
        folder = self._directory / "outputs"
        return upload_outputs(self._context.services, folder, workspace=self._workspace, sources=sources)

    def _upload_notes(self) -> dict[str, ObjectId]:
        services, where = (
            self._context.services,
            {"workspace": self._workspace, "sources": (self.job, self._row["run"])},
        )
        log_blob = upload_log(services, self._host.launcher, self.name, **where)  # type: ignore[arg-type]
        known = packages_of(self._host.environments, self._spec.environment)
        packages = services.blobs.upload(iter([known]), **where)  # type: ignore[arg-type]
        return {"log": log_blob, "environment": packages.id}

    # -------------------------------------------------------------------------------------------- its start

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
        """The values that the job's owner may use now; they are asked for at each start."""
        if not self._spec.secrets:
            return {}
        with acting(self._owner(), fence=self._context.fence):
            return open_secrets(self._context.services.secrets, self._spec.secrets, workspace=self._workspace)

    def _gpus(self) -> tuple[str, ...]:
        """The UUIDs of the cards or slices that were handed out."""
        return tuple(gpu for placed in self._row["placements"] for gpu in placed["gpus"])

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
            wanted=lambda: self._told is None,
            progress=self._note_progress,
            measured=self._note_metrics,
            limits=self._host.limits,
        )
        door = AgentServer(self._agent_folder, agent, home=self._directory, on_fenced=context.on_lost)
        try:
            yield
        finally:
            door.close()

    def _note_progress(self, step: int, total: int) -> None:
        self._pace.advance(step, total)
        is_last = step >= total > 0
        self._note_pace(is_due=not self._has_total or (is_last and not self._was_last))
        self._has_total, self._was_last = True, is_last

    def _note_metrics(self, points: Sequence[MetricPoint]) -> None:
        self._pace.measure(points)
        self._note_pace(is_due=False)

    def _note_pace(self, *, is_due: bool) -> None:
        """Write down how far it is, now and then, or because it is due."""
        far, now = self._pace.progress(), time.monotonic()
        if far is not None and (is_due or now - self._progress_at >= PROGRESS_EVERY_S):
            self._progress_at = now
            self._context.note(self.job, progress=far.model_dump(mode="json"))

    def _owner(self) -> Caller:
        """Whoever the job is for, as they stand now."""
        with self._context.gate.database.read() as tx:
            return requester(tx, self._row, origin=f"job:{self.job}")

    def _go_on(self) -> None:
        if self._asked is not None:
            raise _GivenUp


def _leaving(row: Any) -> Verdict | None:
    """For another job, or to go on elsewhere; none where it was not told to leave."""
    if not row["leaving"]:
        return None
    return "moved" if row["evicted_for"] is None else "preempted"


class _GivenUp(Exception):
    """The attempt was asked to end before it was started."""
