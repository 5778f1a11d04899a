"""One attempt at a job, from staging to its recorded end: a thread that can be killed anywhere and started again."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Literal, TypedDict

from falaj.control.authorization import acting, requester
from falaj.control.jobs.agent import PlatformAgent
from falaj.control.jobs.agent_server import SOCKET, AgentServer
from falaj.control.jobs.context import ControllerContext, JobHost, agent_secret, one_line, remove_attempt
from falaj.control.jobs.default_limits import default_disk_bytes, default_memory_bytes
from falaj.control.jobs.environments import JobPython, describe_image, image_for, packages_of, python_for
from falaj.control.jobs.outputs import upload_log, upload_outputs
from falaj.control.jobs.progress import ProgressMeter
from falaj.control.jobs.staging import stage
from falaj.control.jobs.volumes import link_volumes
from falaj.control.jobs.worker_calls import WorkerCalls
from falaj.errors import Conflict, FalajError, Fenced, Unavailable
from falaj.governance import objects
from falaj.governance.operations.caller import Caller
from falaj.governance.secrets.service import open_secrets
from falaj.ports.launcher import (
    VOLUMES,
    AttemptState,
    Launch,
    OpenPlacement,
    PodImage,
    VolumeMount,
    fence_wait_s,
)
from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.names import ObjectId
from falaj.records.scheduling.accounting import ResourceUsage
from falaj.records.scheduling.snapshot import Node
from falaj.records.tracking import MetricPoint
from falaj.records.training.jobs import JobOutput, Verdict
from falaj.scheduling.capacity.cluster import matches_affinity
from falaj.scheduling.cordons import all_cordons
from falaj.training import store
from falaj.training.inputs import require_volume_zones
from falaj.training.logs import attempt_name
from falaj.training.memory_check import gpu_matches
from falaj.training.moves import describe_request
from falaj.training.runtime.agent.protocol import SECRET_VARIABLE
from falaj.training.store import JobRow

log = logging.getLogger("falaj.controller")

POLL_S = 0.1
PROGRESS_S = 1.0
GRACE_S = {"cancelled": 10.0, "interrupted": 4.0, "lost": 0.0}
"""How long a job may take to end after SIGTERM. The platform itself has ten seconds to stop."""
IMAGE_PATIENCE_S = 3.0
"""How long the cluster may take to say which image an ended attempt ran, if its reference is a tag."""
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
        self._limits = row.limits
        self._waits_for: str | None = None
        self.is_handed_over, self._is_left = row.handed_over, False
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

    def leave(self) -> None:
        """End the thread and leave the attempt as it is to the next controller."""
        self._is_left = True

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
        except _Left:
            return
        except (Unavailable, Conflict) as error:
            self.error = error.message
            log.warning("attempt will be resumed", extra={"attempt": self.name, "reason": error.message})
        except Exception as error:
            self.error = f"{type(error).__name__}; see the controller's log"
            log.exception("attempt failed unexpectedly, will be resumed", extra={"attempt": self.name})

    def _outcome(self) -> tuple[Verdict, AttemptState]:
        try:
            state = self._start_and_wait()
        except (Fenced, Unavailable, _Left):
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
            if self.is_handed_over and _has_run(state):
                self._record_start(state)
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
                    parsers=self._host.parsers,
                    check_stop=self._check_stop,
                )
        with self._agent():
            if state.phase == "unknown":
                self._check_stop()
                self._context.require_lease()
                self._host.launcher.start(self._launch())
            return self._wait()

    @property
    def _lost_s(self) -> float:
        """How long an attempt on a lost node is waited for: another machine stops it by itself after its lease."""
        is_remote, fence_s = self._host.remote is not None, self._host.fence_s
        return fence_wait_s(fence_s) if is_remote and fence_s is not None else LOST_S

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
            if state.limits != self._limits:
                self._record_limits(state.limits)
            if self.is_handed_over and (state.phase == "running" or _has_run(state)):
                self._record_start(state)
            if state.phase == "starting" and state.reason != self._waits_for:
                self._waits_for = state.reason
                self._context.update_job(self.job, reason=state.reason and one_line(state.reason)[:2000])
            if state.phase in ("ended", "lost"):
                return state
            if self._sent == "lost" and time.monotonic() - sent_at >= self._lost_s:
                self._host.launcher.delete(self.name)
                return AttemptState("lost")
            if self._requested is not None and self._requested != self._sent:
                self._send_stop(self._requested)
                sent_at = time.monotonic()
            if self._is_left:
                raise _Left
            time.sleep(POLL_S)

    def _record_start(self, state: AttemptState) -> None:
        """Record where an attempt runs that the queue of the cluster has admitted, once all its nodes are placed."""
        if state.phase == "running" and len(state.hosts) < self._spec.nodes:
            return
        with acting(self._context.service, fence=self._context.fence):
            self._context.services.jobs.begin(
                self.job, attempt=self.number, hosts=state.hosts, since=state.started_at
            )
        self.is_handed_over = False

    def _record_limits(self, limits: tuple[str, ...]) -> None:
        """Record once how its limits are enforced."""
        self._context.update_job(self.job, limits=list(limits))
        self._limits = limits

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
        if state.preempted:
            return "preempted"
        if state.node_restarted or state.fenced or state.evicted:
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
            return f"interrupted: {self._describe_interruption(state)}"
        if verdict == "preempted":
            room = f"it made room for job {self._current_row().evicted_for}"
            return f"preempted: {state.evicted or room}"
        if verdict == "moved":
            return self._describe_move(self._current_row())
        if verdict == "cancelled":
            return "cancelled" + (f": {state.reason}" if state.reason else "")
        return state.reason or f"it ended with exit code {state.exit_code}"

    def _describe_interruption(self, state: AttemptState) -> str:
        if state.node_restarted:
            return "the machine went down"
        if state.fenced:
            return "its machine had no controller for longer than jobs.fence_after"
        if self._lost_node:
            return f"node {self._lost_node} is lost"
        return state.evicted or "the platform stopped"

    def _describe_move(self, row: JobRow) -> str:
        with self._context.gate.database.read() as tx:
            drained = {name for name, cordon in all_cordons(tx).items() if cordon.drained}
        if left := next((each.node for each in row.placements if each.node in drained), None):
            return f"moved: node {left} was drained; it continues on another node, or when this one is back"
        return f"moved: it continues with {describe_request(row.spec)}"

    def _current_row(self) -> JobRow:
        with self._context.gate.database.read() as tx:
            return store.job_row(tx, self.job)

    def _upload_outputs(self) -> tuple[JobOutput, ...]:
        sources = (self.job, self._row.run)
        folder = self._directory / "outputs"
        zone = self._context.output_zone(self.job)
        return upload_outputs(
            self._context.services, folder, workspace=self._workspace, sources=sources, zone=zone
        )

    def _upload_notes(self) -> _Notes:
        services, sources = self._context.services, (self.job, self._row.run)
        zone = self._context.output_zone(self.job)
        log_blob = upload_log(
            services, self._host.launcher, self.name, workspace=self._workspace, sources=sources, zone=zone
        )
        image = self._image()
        packages = packages_of(self._host.environments, self._spec.environment)
        if image is not None:
            packages = describe_image(image).encode()
        listed = services.blobs.upload(
            iter([packages]), workspace=self._workspace, sources=sources, zone=zone
        )
        return {"log": log_blob, "environment": listed.id, "image": None if image is None else image.digest}

    def _image(self) -> PodImage | None:
        """Return the image that the attempt ran in; if that is a tag, wait until the cluster says which one it was."""
        if self._host.remote is None:
            return None
        until = time.monotonic() + IMAGE_PATIENCE_S
        while True:
            found = self._host.remote.image_of(self.name)
            if found.digest or not found.reference or time.monotonic() >= until:
                return found
            time.sleep(POLL_S)

    # ---------------------------------------------------------------------------------------------- start

    def _launch(self) -> Launch:
        spec, directory, remote = self._spec, self._directory, self._host.remote
        labels = self._labels()
        volumes = self._volumes(labels.get("workspace", ""))
        folders = [volume.folder for volume in volumes if volume.folder is not None]
        target = [spec.script] if spec.script is not None else ["-m", str(spec.module)]
        python = self._python if remote is None else JobPython(None)
        return Launch(
            attempt=self.name,
            directory=directory,
            command=[python.executable if remote is None else remote.python, "-u", *target, *spec.args],
            environment=self._environment() | self._volume_variables(volumes),
            framework=spec.framework,
            nodes=spec.nodes,
            processes=spec.processes,
            processes_min=spec.processes_min,
            roles=spec.roles,
            cpus=spec.cpus,
            gpus=self._gpus(),
            gpu_milli=spec.gpu_milli,
            gpu_memory_bytes=spec.gpu_memory_bytes or 0,
            mps_directory=str(self._host.mps),
            memory_bytes=self._memory_bytes(),
            disk_bytes=self._disk_bytes(),
            secrets=self._secrets() if remote is None else {},  # a worker asks for them
            network=spec.network,
            readable=(self._agent_folder, *python.readable, *folders) if remote is None else (),
            hidden=self._host.hidden if remote is None else (),
            timeout_s=None if spec.timeout is None else spec.timeout.total_seconds(),
            hang_s=None if spec.hang_after is None else spec.hang_after.total_seconds(),
            grace_s=GRACE_S["cancelled"],
            nsys=spec.nsys,
            hosts=tuple(placed.node for placed in self._row.placements),
            labels=labels,
            image=self._environment_image(),
            open_placement=self._open_placement() if self.is_handed_over else None,
            volumes=volumes if remote is not None else (),
        )

    def _volumes(self, workspace: str) -> tuple[VolumeMount, ...]:
        """Return the volumes of the job, as an administrator allows them now."""
        if not self._spec.volumes:
            return ()
        found = self._host.volumes(self._spec.volumes, workspace)
        require_volume_zones(self._label(), found, self._context.gate.zones)
        return found

    def _volume_variables(self, volumes: Sequence[VolumeMount]) -> dict[str, str]:
        if self._host.remote is not None:
            return {"FALAJ_VOLUMES": VOLUMES} if volumes else {}
        return link_volumes(volumes, self._agent_folder)

    def _label(self) -> Label:
        with self._context.gate.database.read() as tx:
            found = objects.by_id(tx, self.job)
        return UNRESTRICTED if found is None else found.label

    def _open_placement(self) -> OpenPlacement:
        """Return what the queue of the cluster must know to place the attempt."""
        spec, affinity, label = self._spec, self._spec.affinity, self._label()
        zones = self._context.gate.zones.all()
        permitted = (
            None
            if label.only is None
            else sorted(each.name for each in zones if label.permits(each.jurisdiction))
        )
        machines = tuple(node.name for node in self._suiting_nodes(label)) if self._is_choosy() else ()
        if self._is_choosy() and not machines:  # none would mean any
            raise Unavailable("no node of the kind that it asks for is there now; it is looked for again")
        return OpenPlacement(
            priority=spec.priority,
            zones=None if permitted is None else tuple(permitted),
            machines=machines,
            spread=affinity.spread,
            together=affinity.island is not None,
        )

    def _is_choosy(self) -> bool:
        """Return whether the job names kinds of nodes, which the labels of the cluster do not have as such."""
        affinity = self._spec.affinity
        return bool(affinity.pools or affinity.labels or affinity.avoid or self._spec.gpu_models)

    def _suiting_nodes(self, label: Label) -> list[Node]:
        """Return the nodes on which a replica may run, as far as its kind, its label and its size say."""
        spec = self._spec
        return [
            node
            for node in self._host.nodes()
            if label.permits(node.jurisdiction)
            and matches_affinity(node, spec.affinity)
            and sum(gpu_matches(spec, gpu) for gpu in node.gpus) >= spec.gpus
            and node.cpus >= spec.cpus
        ]

    def _environment_image(self) -> str | None:
        """Return the image of the job's environment on a cluster; none if it names no environment."""
        remote, name = self._host.remote, self._spec.environment
        return None if remote is None or name is None else image_for(remote.environments, name)

    def _labels(self) -> dict[str, str]:
        """Return by which names people know the job."""
        with self._context.gate.database.read() as tx:
            workspace = objects.by_id(tx, self._workspace)
        shown = {"name": self._spec.name, "queue": self._row.queue}
        return shown | ({"workspace": workspace.name} if workspace is not None else {})

    def _memory_bytes(self) -> int | None:
        """Return the memory limit of a replica; none where neither job, configuration nor node gives one."""
        node, given = self._node(), self._spec.memory_bytes or self._host.memory_default_bytes
        if given or node is None:
            return given
        return default_memory_bytes(self._spec, node, replicas=self._replicas_on(node))

    def _disk_bytes(self) -> int | None:
        node, given = self._node(), self._spec.disk_bytes or self._host.disk_default_bytes
        if given or node is None:
            return given
        free_bytes = shutil.disk_usage(self._host.folder).free
        return default_disk_bytes(self._spec, node, free_bytes=free_bytes, replicas=self._replicas_on(node))

    def _node(self) -> Node | None:
        if self.is_handed_over:  # whichever it will be, the smallest has this much
            suiting = self._suiting_nodes(UNRESTRICTED)
            return min(suiting, key=lambda node: (node.memory_bytes, node.name), default=None)
        placed = {each.node for each in self._row.placements}
        return next((node for node in self._host.nodes() if node.name in placed), None)

    def _replicas_on(self, node: Node) -> int:
        return sum(placed.node == node.name for placed in self._row.placements) or 1

    def _environment(self) -> dict[str, str]:
        named = {"FALAJ_JOB": self.job, "FALAJ_ATTEMPT": str(self.number)}
        if self._host.remote is not None:
            return self._spec.env | named  # its worker knows the rest
        directory = self._directory
        own = named | {
            "FALAJ_INPUTS": str(directory / "inputs"),
            "FALAJ_OUTPUTS": str(directory / "outputs"),
            "FALAJ_AGENT": str(self._agent_folder / SOCKET),
            SECRET_VARIABLE: self._agent_secret(),
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
        """Return the UUIDs of the allocated GPUs or slices; just as many names where the cluster allocates them."""
        if self.is_handed_over:
            profile = self._spec.gpu_profile
            kind = f"mig-{profile}" if profile is not None and "/" not in profile else "gpu"
            return tuple(f"any/{kind}-{number}" for number in range(self._spec.nodes * self._spec.gpus))
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
            zone=lambda: context.output_zone(self.job),
            is_store_open=self._host.remote is not None and self._host.remote.is_store_open,
        )
        if context.agents is not None and self._host.remote is not None:
            workers = self._host.remote.workers(self.name)
            calls = WorkerCalls(workers, agent, secrets=self._secrets, require_lease=context.require_lease)
            try:
                with context.agents.serving(self.name, calls):
                    yield
            finally:
                agent.close()
            return
        server = AgentServer(
            self._agent_folder,
            agent,
            home=self._directory,
            on_fenced=context.on_lost,
            secret=self._agent_secret(),
        )
        try:
            yield
        finally:
            server.close()

    def _agent_secret(self) -> str:
        return agent_secret(self._host.agent_key, self.job, self.number)

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
    image: str | None


def _has_run(state: AttemptState) -> bool:
    """Return whether code of an attempt that is over has run."""
    return state.phase == "lost" or state.exit_code is not None


class _Stopped(Exception):
    """The attempt was to stop before it was started."""


class _Left(Exception):
    """The attempt is left to the next controller."""
