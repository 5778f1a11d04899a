"""One attempt at a job, from its directory to its outcome: a thread that can be killed anywhere and begun again."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from falaj.control import lease
from falaj.control.agents import SOCKET, AgentDoor, PlatformAgent
from falaj.control.behalf import acting, asker
from falaj.control.collecting import environment, upload_log, upload_outputs
from falaj.control.platform import Rooms
from falaj.control.staging import stage
from falaj.errors import Conflict, FalajError, Fenced, Unavailable
from falaj.governance import objects
from falaj.governance.caller import Caller
from falaj.governance.gate import Gate
from falaj.governance.idempotency import hold_fence
from falaj.ports.launcher import AttemptState, Launch, Launcher
from falaj.records.names import ObjectId
from falaj.records.scheduling import Node
from falaj.records.training import JobOutput, JobSpec, Verdict
from falaj.training import store
from falaj.training.logs import attempt_name

log = logging.getLogger("falaj.controller")

LOOK_EVERY_S = 0.1
PROGRESS_EVERY_S = 1.0
GRACE_S = {"cancelled": 10.0, "interrupted": 4.0}
"""How long a job may take to end when it is asked to. The platform itself is given ten seconds to stop."""

PACKAGE = Path(__file__).parents[1]
"""Falaj itself: jobs import the runtime from it."""

Asked = Literal["cancelled", "interrupted"]


@dataclass(frozen=True)
class Yard:
    """Where jobs run: `folder` has the directories of attempts; `hidden` is kept from them."""

    folder: Path
    launcher: Launcher
    nodes: Callable[[], tuple[Node, ...]]
    hidden: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Office:
    """In whose name attempts are kept: the controller's, as long as its lease holds."""

    gate: Gate
    rooms: Rooms
    service: Caller
    fence: int
    on_lost: Callable[[], NoReturn]

    def note(self, job: str, **values: Any) -> None:
        """Write down something about a job, unless another controller has taken over."""
        with self.gate.database.write() as tx:
            hold_fence(self.fence, lease.current_fence(tx))
            store.change(tx, job, **values)

    def require_lease(self) -> None:
        with self.gate.database.read() as tx:
            hold_fence(self.fence, lease.current_fence(tx))


class Attempt:
    """The attempt that the row of a running job tells of."""

    def __init__(self, office: Office, yard: Yard, row: Any) -> None:
        self._office, self._yard, self._row = office, yard, row
        self.job: ObjectId = row["id"]
        self.number: int = row["attempt"]
        self.name = attempt_name(self.job, self.number)
        self._spec = JobSpec.model_validate(row["spec"])
        self._directory = yard.folder / self.job / str(self.number)
        self._agent_folder = yard.folder / self.job / f"{self.number}.agent"
        self._asked: Asked | None = "interrupted" if row["interrupting"] else None
        self._progress_at, self._was_last = 0.0, False
        with office.gate.database.read() as tx:
            found = objects.by_id(tx, self.job)
        self._workspace = ObjectId("") if found is None else found.workspace

    def ask(self, why: Asked) -> None:
        """Have it end soon; what was asked first counts."""
        self._asked = self._asked or why

    def live(self) -> None:
        """Bring the attempt to its end, from wherever it stands. Whatever happens, nothing is started twice."""
        try:
            self._settle(*self._outcome())
        except Fenced:
            self._office.on_lost()
        except (Unavailable, Conflict) as error:
            log.warning("an attempt is taken up again", extra={"attempt": self.name, "reason": error.message})
        except Exception:
            log.exception("an attempt broke; it is taken up again", extra={"attempt": self.name})

    def _outcome(self) -> tuple[Verdict, AttemptState]:
        try:
            state = self._run()
        except (Fenced, Unavailable):
            raise
        except _GivenUp:
            return self._asked or "interrupted", AttemptState("unknown")
        except FalajError as error:  # it cannot be started: refused, or something that it needs is gone
            return "failed", AttemptState("ended", reason=printable(str(error)))
        except Exception as error:
            if self._yard.launcher.state(self.name).phase != "unknown":
                raise
            log.exception("an attempt could not be prepared", extra={"attempt": self.name})
            return "failed", AttemptState("ended", reason=f"it could not be prepared: {error}")
        return self._verdict(state), state

    def _run(self) -> AttemptState:
        """Start the attempt if it never was, and wait for its end."""
        state = self._yard.launcher.state(self.name)
        if state.phase in ("ended", "lost"):
            return state
        if state.phase == "unknown":
            self._go_on()
            with acting(self._owner(), fence=self._office.fence):
                stage(
                    self._office.rooms,
                    self._office.gate.database,
                    self._row,
                    self._directory,
                    go_on=self._go_on,
                )
        with self._agent():
            if state.phase == "unknown":
                self._go_on()
                self._office.require_lease()
                self._yard.launcher.start(self._launch())
            return self._wait()

    def _wait(self) -> AttemptState:
        told = False
        while True:
            state = self._yard.launcher.state(self.name)
            if state.phase == "unknown":
                raise Unavailable(f"{self.name} was started, and did not begin")
            if state.phase in ("ended", "lost"):
                return state
            if self._asked is not None and not told:
                if self._asked == "interrupted":
                    self._office.note(self.job, interrupting=True)
                self._yard.launcher.stop(self.name, grace_s=GRACE_S[self._asked])
                told = True
            time.sleep(LOOK_EVERY_S)

    def _verdict(self, state: AttemptState) -> Verdict:
        with self._office.gate.database.read() as tx:
            row = store.row(tx, self.job)
        if row["cancelling"]:
            return "cancelled"
        if row["interrupting"]:
            return "interrupted"
        return "done" if state.phase == "ended" and state.exit_code == 0 else "failed"

    # -------------------------------------------------------------------------------------------- its end

    def _settle(self, verdict: Verdict, state: AttemptState) -> None:
        """Upload what it left, publish it together with the outcome, and clear up."""
        reason, outputs = self._reason(verdict, state), tuple[JobOutput, ...]()
        kept: dict[str, ObjectId] = {}
        try:
            with acting(self._owner(), fence=self._office.fence):
                if verdict == "done":
                    outputs = self._upload_outputs()
                kept = self._upload_notes()
        except (Fenced, Unavailable):
            raise
        except FalajError as error:
            verdict = "failed" if verdict == "done" else verdict
            reason = f"{reason + '; ' if reason else ''}what it left could not be kept: {error}"
        with acting(self._office.service, fence=self._office.fence):
            self._office.rooms.jobs.settle(
                self.job,
                attempt=self.number,
                verdict=verdict,
                reason=reason and printable(reason)[:2000],
                exit_code=state.exit_code,
                outputs=outputs,
                **kept,
            )
        self.clear()

    def clear(self) -> None:
        """Remove what is left of an attempt that is settled."""
        clear_attempt(self._yard, self.job, self.number)

    def _reason(self, verdict: Verdict, state: AttemptState) -> str | None:
        if verdict == "done":
            return None
        if verdict == "interrupted":
            return "interrupted: the platform stopped"
        if verdict == "cancelled":
            return "cancelled" + (f": {state.reason}" if state.reason else "")
        return state.reason or f"it ended with exit code {state.exit_code}"

    def _upload_outputs(self) -> tuple[JobOutput, ...]:
        sources = (self.job, self._row["run"])
        folder = self._directory / "outputs"
        return upload_outputs(self._office.rooms, folder, workspace=self._workspace, sources=sources)

    def _upload_notes(self) -> dict[str, ObjectId]:
        rooms, where = (
            self._office.rooms,
            {"workspace": self._workspace, "sources": (self.job, self._row["run"])},
        )
        log_blob = upload_log(rooms, self._yard.launcher, self.name, **where)  # type: ignore[arg-type]
        packages = rooms.blob.upload(iter([environment().encode()]), **where)  # type: ignore[arg-type]
        return {"log": log_blob, "environment": packages.id}

    # -------------------------------------------------------------------------------------------- its start

    def _launch(self) -> Launch:
        spec, directory = self._spec, self._directory
        target = [spec.script] if spec.script is not None else ["-m", str(spec.module)]
        return Launch(
            attempt=self.name,
            directory=directory,
            command=[sys.executable, "-u", *target, *spec.args],
            environment=self._environment(),
            framework=spec.framework,
            processes=spec.processes,
            cpus=spec.cpus,
            gpus=self._gpu_numbers(),
            memory_bytes=spec.memory_bytes,
            network=spec.network,
            readable=(self._agent_folder, PACKAGE),
            hidden=self._yard.hidden,
            timeout_s=None if spec.timeout is None else spec.timeout.total_seconds(),
            grace_s=GRACE_S["cancelled"],
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
        path = os.pathsep.join([str(Path(sys.executable).parent), os.defpath])
        usual = {"HOME": str(directory), "PATH": path, "LC_ALL": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
        return usual | self._spec.env | own

    def _gpu_numbers(self) -> tuple[int, ...]:
        """The cards that were handed out, by their numbers on this machine."""
        wanted = {gpu for placed in self._row["placements"] for gpu in placed["gpus"]}
        if not wanted:
            return ()
        cards = [gpu.id for node in self._yard.nodes() for gpu in node.gpus]
        return tuple(number for number, card in enumerate(cards) if card in wanted)

    @contextmanager
    def _agent(self) -> Iterator[None]:
        office = self._office
        agent = PlatformAgent(
            office.rooms,
            self._row,
            workspace=self._workspace,
            owner=self._owner,
            service=office.service,
            fence=office.fence,
            wanted=lambda: self._asked is None,
            progress=self._note_progress,
        )
        door = AgentDoor(self._agent_folder, agent, home=self._directory, on_fenced=office.on_lost)
        try:
            yield
        finally:
            door.close()

    def _note_progress(self, step: int, total: int) -> None:
        now, is_last = time.monotonic(), step >= total
        if now - self._progress_at >= PROGRESS_EVERY_S or (is_last and not self._was_last):
            self._progress_at, self._was_last = now, is_last
            self._office.note(self.job, progress={"step": step, "total": total})

    def _owner(self) -> Caller:
        """Whoever the job is for, as they stand now."""
        with self._office.gate.database.read() as tx:
            return asker(tx, self._row, origin=f"job:{self.job}")

    def _go_on(self) -> None:
        if self._asked is not None:
            raise _GivenUp


def printable(words: str) -> str:
    """On one line; what is no text, as in the names of files, is escaped."""
    return " ".join(words.encode(errors="backslashreplace").decode().split())


def clear_attempt(yard: Yard, job: str, number: int) -> None:
    """Remove all that is left of an attempt that is over; again, if it was interrupted."""
    home = yard.folder / job
    yard.launcher.forget(attempt_name(job, number))
    for left in [home / str(number), home / f"{number}.agent", *home.glob(f".{number}-*")]:
        shutil.rmtree(left, ignore_errors=True)
    with suppress(OSError):
        home.rmdir()


class _GivenUp(Exception):
    """The attempt was asked to end before it was started."""
