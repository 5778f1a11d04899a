"""The model server under `falaj up`: opens its port, runs as many replicas as the load needs, and replaces them."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta

from falaj.apps.message_writer import MessageWriter
from falaj.apps.ports import open_sockets
from falaj.assembly.home import Home
from falaj.assembly.model_server import (
    process_replicas,
    publish_local_socket,
    publish_replicas,
    sockets_needed,
)
from falaj.ports.replicas import ReplicaDriver
from falaj.records.config import ServingConfig
from falaj.records.control.replicas import Replica, ReplicaState
from falaj.serving.runtime.replica_scaling import (
    DOWN_WINDOW_S,
    LoadSample,
    ScalingState,
    decide_replicas,
)

BACKOFF_S = (0.1, 1.0, 5.0)
UNABLE_S = (5.0, 15.0, 60.0)
"""Pauses of a model server that cannot start: somebody has to change what keeps it from that."""
CRASHES = 3
"""A model server that ended so often within a minute each cannot start."""
STEADY_S = 60.0
"""After running this long, a replica counts as recovered."""
SAMPLE_S = 1.0
DRAIN = timedelta(seconds=30)

StartDriver = Callable[[Home, Mapping[str, Sequence[socket.socket]], int], ReplicaDriver]


def start_processes(home: Home, sockets: Mapping[str, Sequence[socket.socket]], output: int) -> ReplicaDriver:
    return process_replicas(home, sockets, output=output)


@dataclass
class ModelReplicas:
    """The replicas of one home. `tick` is called several times a second, by one thread."""

    home: Home
    serving: ServingConfig
    port: str
    """The port to listen on, as `spell_port` writes it."""
    scheme: str
    messages: MessageWriter
    publish: Callable[..., None]
    """Publishes facts about the running platform."""
    grpc_port: str | None = None
    """The port to speak gRPC on; none if that is off."""
    start_driver: StartDriver = start_processes
    driver: ReplicaDriver | None = None
    url: str = ""
    grpc: str | None = None
    """Where gRPC is spoken, as host and port."""
    problem: str | None = None
    """What keeps the model server from serving."""
    failures: int = 0
    start_at: float = 0.0
    why: str = ""
    """The reason of the last change of their number."""
    state: ScalingState = field(init=False)
    sampled_at: float = float("-inf")
    samples: deque[LoadSample] = field(default_factory=lambda: deque(maxlen=int(DOWN_WINDOW_S / SAMPLE_S)))
    marker: str = field(init=False)
    """What the marker of the home says; other words ask for a restart."""
    restarting: list[str] = field(default_factory=list)
    """Replicas that are to be replaced, oldest first."""
    _opened: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        now, self.marker = time.monotonic(), self._read_marker()
        wanted = max(self.serving.replicas.min, 1)  # something is deployed: somebody will ask
        self.state = ScalingState(wanted, changed_at=now, last_request_at=now)

    def tick(self, now: float) -> None:
        """Start, stop and replace replicas as needed, once something is deployed."""
        if self.driver is None:
            if now < self.start_at or not self.home.serving.exists():
                return
            self.driver = self._open(now)
        if self.driver is None:
            return
        found = self.driver.replicas()
        for each in found:
            if each.state is ReplicaState.ENDED:
                self._ended(self.driver, each, now)
        if (marker := self._read_marker()) != self.marker:
            self.marker = marker
            self.restart()
        running = [each for each in found if each.state in (ReplicaState.STARTING, ReplicaState.READY)]
        if any(each.state is ReplicaState.READY for each in running):
            self._recover(running)
        self._decide(self.driver, found, now)
        self._reach(self.driver, running, now)

    def close(self, *, by: float) -> None:
        """Stop all replicas by a monotonic time."""
        if self.driver is not None:
            self.driver.close(within=timedelta(seconds=max(0.1, by - time.monotonic())))
            self.home.replicas.unlink(missing_ok=True)
        self._opened.close()

    def restart(self) -> None:
        """Replace all replicas, one after the other."""
        if self.driver is not None:
            self.messages.say("the replicas of the model server are restarted, one after the other")
            self.restarting = [
                each.name for each in self.driver.replicas() if each.state is ReplicaState.READY
            ]

    def _read_marker(self) -> str:
        try:
            return self.home.serving.read_text()
        except OSError:
            return ""

    # ------------------------------------------------------------------------------------------ sockets

    def _open(self, now: float) -> ReplicaDriver | None:
        """Open the sockets that all replicas share; what keeps them from that is told, and tried again later."""
        number = sockets_needed(self.serving.replicas.most)
        http = self._open_port("port", self.port, number, now)
        if http is None:
            return None
        sockets: dict[str, Sequence[socket.socket]] = {"http": http}
        if self.grpc_port is not None:
            grpc = self._open_port("grpc_port", self.grpc_port, number, now)
            if grpc is None:
                for each in http:
                    each.close()
                return None
            sockets["grpc"], self.grpc = grpc, _address(grpc[0])
        inner = self._opened.enter_context(publish_local_socket(self.home))
        self.url = f"{self.scheme}://{_address(http[0])}"
        self.failures, self.problem = 0, None
        return self.start_driver(self.home, sockets | {"local": [inner.socket]}, self.messages.pipe)

    def _open_port(self, name: str, port: str, number: int, now: float) -> list[socket.socket] | None:
        try:
            return open_sockets(self.serving.bind, port, number)
        except OSError as error:
            self._unable(
                f"the model server cannot listen on {self.serving.bind}:{port.rstrip('+')} ({error.strerror}); "
                f"set serving.{name} in falaj.toml to a free port, or to 0, and restart the platform"
            )
            self._back_off(UNABLE_S, now)
            return None

    # ------------------------------------------------------------------------------------------ failures

    def _ended(self, driver: ReplicaDriver, replica: Replica, now: float) -> None:
        """Note the end of a replica; unless it was told to end, another one takes its place after a pause."""
        driver.forget(replica.name)
        if replica.was_stopped:
            return
        self.restarting.clear()  # what ends by itself is not given another chance in each place
        if replica.age_s > STEADY_S:
            self.failures = 0
        if replica.problem is not None:
            self._unable(replica.problem)
        elif self.failures + 1 >= CRASHES and self.problem is None:
            log = self.home.logs / "models.jsonl"
            self._unable(f"the model server ends as soon as it starts ({replica.exit}); see {log}")
        if self.problem is None:
            self.messages.warn(f"the model server ended ({replica.exit}); it is restarted")
        self._back_off(UNABLE_S if self.problem is not None else BACKOFF_S, now)

    def _back_off(self, pauses: tuple[float, ...], now: float) -> None:
        self.start_at = now + pauses[min(self.failures, len(pauses) - 1)]
        self.failures += 1

    def _unable(self, problem: str) -> None:
        if problem != self.problem:
            self.messages.warn(problem)
        self.problem = problem
        self.publish(models=None, models_grpc=None, models_problem=problem)

    def _recover(self, running: Sequence[Replica]) -> None:
        self.problem = None
        if all(each.age_s > STEADY_S for each in running):
            self.failures = 0

    # ------------------------------------------------------------------------------------------- scaling

    def _decide(self, driver: ReplicaDriver, found: Sequence[Replica], now: float) -> None:
        ready = [each for each in found if each.state is ReplicaState.READY]
        waiting = not ready and driver.has_waiting_clients()
        if now - self.sampled_at >= SAMPLE_S or waiting:
            self.sampled_at = now
            publish_replicas(self.home, found)
            if ready:
                self.samples.append(_sample(ready, now))
            else:
                self.samples.clear()
            before = self.state.wanted
            decision, self.state = decide_replicas(
                self.serving.replicas, self.state, list(self.samples), waiting=waiting, now=now
            )
            if self.state.wanted != before:
                self.why = decision.reason
                self.messages.say(f"the model server gets {_number(self.state.wanted)}: {self.why}")
        if ready or (self.state.wanted == 0 and self.url):
            self.publish(
                models=self.url,
                models_grpc=self.grpc,
                models_problem=None,
                replicas=self._described(len(ready)),
            )

    def _described(self, ready: int) -> str:
        """Return how many replicas are ready, and why as many are wanted."""
        config, wanted = self.serving.replicas, self.state.wanted
        words = f"{ready} ready" if ready == wanted else f"{ready} of {wanted} ready"
        if config.min == config.most:
            return words
        return f"{words}, between {config.min} and {config.most}" + (f" ({self.why})" if self.why else "")

    def _reach(self, driver: ReplicaDriver, running: Sequence[Replica], now: float) -> None:
        """Start or stop replicas until there are as many as wanted, and replace those to be restarted."""
        missing = self.state.wanted - len(running)
        if missing > 0 and now >= self.start_at:
            try:
                for _ in range(missing):
                    driver.start()
            except OSError as error:
                self.messages.warn(f"the model server could not be started: {error}")
                self.start_at = now + BACKOFF_S[-1]
        if missing < 0 and not any(each.state is ReplicaState.STARTING for each in running):
            for each in running[missing:]:
                driver.stop(each.name, within=DRAIN)
        self._restart_next(driver, running)

    def _restart_next(self, driver: ReplicaDriver, running: Sequence[Replica]) -> None:
        """Start the successor of the next replica to be restarted, once that of the one before is ready."""
        if not self.restarting or any(each.state is ReplicaState.STARTING for each in running):
            return
        name = self.restarting.pop(0)
        if any(each.name == name for each in running):
            driver.start(replaces=name)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def _sample(ready: Sequence[Replica], now: float) -> LoadSample:
    """Return the load of all ready replicas; p99 is that of the slowest."""
    loads = [each.load for each in ready if each.load is not None]
    slow = [load.p99_ms for load in loads if load.p99_ms is not None]
    return LoadSample(
        at=now,
        ready=len(ready),
        in_flight=sum(load.in_flight for load in loads),
        requests_per_s=sum(load.requests_per_s for load in loads),
        refused_per_s=sum(load.refused_per_s for load in loads),
        p99_ms=max(slow, default=None),
    )


def _number(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"
