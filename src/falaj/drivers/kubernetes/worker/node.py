"""One node of an attempt in its pod: fetched, run by the supervisor of one machine, and reported."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from falaj.drivers.kubernetes.worker.platform_client import WorkerClient, output_files
from falaj.drivers.processes.attempt_folder import AttemptFolder, read_json, write_json
from falaj.drivers.processes.attempt_lease import AttemptLease
from falaj.drivers.processes.supervisor_start import start_supervisor
from falaj.ports.cluster.python_packages import list_packages
from falaj.ports.machine.boot import boot_seconds
from falaj.records.sizes import format_size
from falaj.training.runtime.agent.protocol import CERTIFICATE_VARIABLE, SECRET_VARIABLE
from falaj.training.runtime.errors import (
    AgentLost,
    AgentRefused,
    CheckpointFailed,
    InvalidTraining,
    TrainingError,
)

POLL_S = 0.1
RENEW_S = 1.0
LOG_EVERY_S = 0.2
TOUCH_PATIENCE_S = 2.0
LOG_PIECE_BYTES = 1 << 20
LOG_LIMIT_BYTES = 256 << 20
START_PATIENCE_S = 600.0
DELIVERY_PATIENCE_S = 3600.0
"""How long the result and the outputs of an ended node wait for a platform that is away."""
MESSAGE = Path("/dev/termination-log")
MESSAGE_BYTES = 4000
"""The kubelet keeps 4096 bytes of a termination message."""
EVICTION_GRACE_S = 60.0
OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Of the pod's own cgroup, version 2 and version 1."""


@dataclass
class WorkerNode:
    """The node `node_rank` in the pod with the uid `pod`, which works in `folder`."""

    address: str
    node_rank: int
    pod: str
    folder: Path
    eviction_grace_s: float = EVICTION_GRACE_S
    message_file: Path = MESSAGE
    _told: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _is_refused: bool = False
    _ahead_s: float = 0.0
    """By how much the clock of this machine is ahead of the platform's."""

    def __post_init__(self) -> None:
        self._log = LogShipper(self.attempt.log)
        self._has_listed_packages = self.node_rank > 0
        self._oom_kills, self._memory = count_oom_kills(), ""

    @classmethod
    def from_environment(cls) -> WorkerNode:
        given = os.environ
        return cls(
            given["FALAJ_AGENT"],
            int(given.get("FALAJ_NODE_RANK") or 0),
            given["FALAJ_POD"],
            Path(given.get("FALAJ_WORK", "/falaj")),
            float(given.get("FALAJ_EVICTION_GRACE_S", EVICTION_GRACE_S)),
            Path(given.get("FALAJ_TERMINATION_LOG", MESSAGE)),
        )

    @property
    def attempt(self) -> AttemptFolder:
        """The folder of the supervisor."""
        return AttemptFolder(self.folder / "control" / "attempt")

    @property
    def directory(self) -> Path:
        """The folder of the job: code, inputs and outputs."""
        return self.folder / "job"

    @property
    def lease(self) -> Path:
        return self.folder / "control" / "lease"

    def run(self) -> int:
        """Run the node to its end, and return the exit code of the pod."""
        signal.signal(signal.SIGTERM, self._on_term)
        self.attempt.path.mkdir(mode=0o700, parents=True)
        client = self._connect(START_PATIENCE_S)
        there = client.claim()
        self._ahead_s = time.time() - there
        launch, secrets = client.launch()
        if launch["memory_bytes"] is not None:
            self._memory = format_size(launch["memory_bytes"])
        try:
            self._fetch(client)
        except (OSError, ValueError) as error:
            return self._deliver(failed_to_start(f"its files could not be fetched: {error}"))
        self._renew(client)
        if self._told.is_set():
            return self._deliver(ended_before_start())
        write_json(self.attempt.launch, supervisor_spec(self._localized(launch), self.lease))
        problem = start_supervisor(self.attempt, secrets)
        if problem:
            return self._deliver(failed_to_start(problem))
        with self._in_touch():
            self._follow()
        return self._deliver(self._result())

    def _connect(self, patience_s: float) -> WorkerClient:
        return WorkerClient.connect(self.address, self.node_rank, self.pod, patience_s=patience_s)

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        """The cluster ends the pod: it is evicted, its node is drained, or somebody deleted it."""
        self._told.set()

    def _fetch(self, client: WorkerClient) -> None:
        for part in ("code", "inputs", "outputs"):
            (self.directory / part).mkdir(mode=0o700, parents=True)
        client.fetch_all(self.directory)

    def _localized(self, launch: dict[str, Any]) -> dict[str, Any]:
        """Return the launch for this pod: its folders, its agent, and the GPUs that the cluster gave it.

        Memory and CPUs are limited by the pod itself.
        """
        directory, given = self.directory, launch["environment"]
        own = {
            "FALAJ_INPUTS": str(directory / "inputs"),
            "FALAJ_OUTPUTS": str(directory / "outputs"),
            "FALAJ_AGENT": self.address,
            CERTIFICATE_VARIABLE: os.environ[CERTIFICATE_VARIABLE],
            SECRET_VARIABLE: os.environ[SECRET_VARIABLE],
        }
        path = os.pathsep.join([str(Path(sys.executable).parent), os.defpath])
        usual = {"HOME": str(directory), "PATH": path, "LC_ALL": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
        # A PYTHONPATH that the job was given comes first; the image may need its own for `import falaj`.
        paths = [each for each in (given.get("PYTHONPATH"), os.environ.get("PYTHONPATH")) if each]
        own |= {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
        return launch | {
            "directory": str(directory),
            "environment": usual | given | own,
            "gpus": visible_gpus() if launch["gpus"] else [],
            "memory_bytes": None,
            "readable": [],
            "hidden": [],
        }

    # -------------------------------------------------------------------------------------- while it runs

    def _renew(self, client: WorkerClient) -> None:
        """Renew the lease, counted from before the platform was asked, and stop if it says so."""
        since = boot_seconds()
        lasts_s, stop_grace_s = client.renew()
        AttemptLease(self.lease, lasts_s).renew(since)
        if stop_grace_s is not None:
            self._stop(stop_grace_s)

    def _keep_up(self, client: WorkerClient) -> None:
        """Renew the lease, and say once which packages the image has: its code runs meanwhile."""
        self._renew(client)
        self._list_packages(client)

    def _list_packages(self, client: WorkerClient) -> None:
        """Send the packages of the image, unless that was done; node 0 does it for all."""
        if not self._has_listed_packages:
            client.save_packages(list_packages())
            self._has_listed_packages = True

    @contextlib.contextmanager
    def _in_touch(self) -> Iterator[None]:
        """Renew the lease and send the log, each on a connection of its own, while the context is open."""
        threads = [
            threading.Thread(target=self._repeat, args=(each, every_s))
            for each, every_s in ((self._keep_up, RENEW_S), (self._log.send_new, LOG_EVERY_S))
        ]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            self._over.set()
            for each in threads:
                each.join()

    def _repeat(self, act: Callable[[WorkerClient], None], every_s: float) -> None:
        """Call `act` again and again. While the platform is away, the lease runs out by itself."""
        client = None
        while not self._over.wait(every_s) and not self._is_refused:
            try:
                client = client or self._connect(TOUCH_PATIENCE_S)
                act(client)
            except AgentRefused as error:
                print(f"falaj: {error.message}", file=sys.stderr, flush=True)
                self._is_refused = True
                self._stop(0.0)
            except (AgentLost, OSError, ValueError):
                client = None

    def _stop(self, grace_s: float) -> None:
        if (read_json(self.attempt.stop) or {}).get("grace_s") != grace_s:
            write_json(self.attempt.stop, {"grace_s": grace_s})

    def _follow(self) -> None:
        """Print the log until the supervisor has ended; stop when the cluster ends the pod."""
        is_told = False
        while self.attempt.is_locked():
            if self._told.is_set() and not is_told:
                is_told = True
                self._stop(self.eviction_grace_s)
            self._log.print_new()
            reap_orphans()
            time.sleep(POLL_S)
        self._log.print_new()

    # ------------------------------------------------------------------------------------- when it is over

    def _result(self) -> dict[str, Any]:
        """Return how the supervisor says that it ended, and whether the cluster wanted that."""
        found = read_json(self.attempt.ended)
        if found is None:
            return ended_without_code(self.attempt.explain_loss()) | {"lost": True}
        if found["signal"] == signal.SIGKILL and count_oom_kills() > self._oom_kills:
            limit = f": it may have {self._memory}" if self._memory else ""
            found["reason"] = f"Killed by SIGKILL; it ran out of memory{limit}"
        limits = [f"memory: {self._memory} by the pod", *found["limits"]] if self._memory else found["limits"]
        return found | {"limits": limits, "evicted": self._told.is_set() and bool(found["stopped"])}

    def _deliver(self, result: dict[str, Any]) -> int:
        """Bring log, outputs and result to the platform. The termination message has the result in any case.

        Times are those of the platform's clock.
        """
        result |= {name: result[name] - self._ahead_s for name in ("started_at", "ended_at")}
        write_message(self.message_file, result | {"delivered": False})
        if self._is_refused:
            return 1
        try:
            client = self._connect(DELIVERY_PATIENCE_S)
            self._log.send_new(client)
            if not self._has_listed_packages:
                with contextlib.suppress(TrainingError):  # the result counts more than the list
                    self._list_packages(self._connect(TOUCH_PATIENCE_S))
            fault = self._send_outputs(client) if result["exit_code"] == 0 else None
            if fault is not None:
                result |= {"exit_code": 1, "reason": f"Its outputs could not be stored: {fault}"}
            client.report_end(result)
        except TrainingError as error:
            print(f"falaj: the result was not delivered: {error.message}", file=sys.stderr, flush=True)
            return 1
        write_message(self.message_file, result | {"delivered": True})
        return exit_code(result)

    def _send_outputs(self, client: WorkerClient) -> str | None:
        """Send the outputs; return why one cannot be sent or is not accepted, none if all were."""
        try:
            for path, file in output_files(self.directory / "outputs"):
                client.save_output(path, file)
        except (InvalidTraining, CheckpointFailed) as error:
            return error.message
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return None


class LogShipper:
    """Copies the log of the supervisor to stdout, where the cluster keeps it, and to the platform."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._printed = self._sent = 0

    def print_new(self) -> None:
        while piece := self._read(self._printed):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            self._printed += len(piece)

    def send_new(self, client: WorkerClient) -> None:
        while piece := self._read(self._sent):
            self._sent = client.append_log(self._sent, piece)

    def _read(self, offset: int) -> bytes:
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(offset)
            return file.read(LOG_PIECE_BYTES)
        return b""


def supervisor_spec(launch: dict[str, Any], lease: Path) -> dict[str, Any]:
    """Return the instructions for the supervisor: the pod is the sandbox."""
    facts = {"is_root": os.geteuid() == 0, "python": sys.executable, "spare_uids": [0, 0]}
    return {
        "launch": launch,
        "sandbox": {"mechanism": "same-uid", "facts": facts},
        "log_limit_bytes": LOG_LIMIT_BYTES,
        "lease": str(lease),
    }


def visible_gpus() -> list[str]:
    """Return the GPUs that the device plugin gave to this pod."""
    found = os.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    return [each for each in found.split(",") if each not in ("", "all", "none", "void")]


def ended_before_start() -> dict[str, Any]:
    words = "It was stopped on request before it started"
    return ended_without_code(words) | {"signal": int(signal.SIGTERM), "stopped": True, "evicted": True}


def failed_to_start(problem: str) -> dict[str, Any]:
    return ended_without_code(f"It could not be started: {problem}")


def ended_without_code(reason: str) -> dict[str, Any]:
    """Return the result of a node whose end no supervisor recorded."""
    now = time.time()
    return {
        "exit_code": None,
        "signal": None,
        "reason": reason,
        "started_at": now,
        "ended_at": now,
        "used": {},
        "limits": [],
        "stopped": False,
        "fenced": False,
    }


def exit_code(result: dict[str, Any]) -> int:
    """Return the exit code by which the cluster shows how the node ended."""
    if result["exit_code"] is not None:
        return int(result["exit_code"]) & 255
    return 128 + int(result["signal"] or 0) if result["signal"] else 1


def write_message(path: Path, result: dict[str, Any]) -> None:
    """Leave the result where the kubelet finds it, shortened until it fits."""
    kept = {name: value for name, value in result.items() if name != "limits"}
    text = json.dumps({"falaj": kept})
    if len(text.encode()) > MESSAGE_BYTES:
        text = json.dumps({"falaj": kept | {"reason": str(kept["reason"])[:500], "used": {}}})
    with contextlib.suppress(OSError):
        path.write_text(text)


def count_oom_kills() -> int:
    """Return how many processes of this pod the kernel has killed because the pod ran out of memory."""
    for path in OOM_COUNTERS:
        with contextlib.suppress(OSError, ValueError):
            counted = dict(line.split() for line in Path(path).read_text().splitlines())
            return int(counted.get("oom_kill", 0))
    return 0


def reap_orphans() -> None:
    """Reap what ended among our children: the first process of a container inherits all orphans."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
