"""The model server: listens, enforces deadlines, reloads deployments and shuts down gracefully."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import numpy.typing as npt

from falaj.apps.byte_shares import ByteShares
from falaj.apps.model_server.grpc.connection import GrpcConnection
from falaj.apps.model_server.grpc.service import GrpcService
from falaj.apps.model_server.http.connection import Connection, ServerConnection
from falaj.apps.model_server.inference.dispatch import Dispatcher
from falaj.apps.model_server.inference.prediction import Prediction, predicted_batch
from falaj.apps.model_server.limits import ServerLimits
from falaj.apps.model_server.metrics import ServerMetrics
from falaj.apps.tls_listener import TlsListener
from falaj.errors import FalajError
from falaj.records.config import ServerConfig, Tls
from falaj.records.serving import Deployment, Endpoint, ServedFile
from falaj.serving.dependencies import (
    Admission,
    AuthenticationFailures,
    FeatureReader,
    NoAuthenticationFailures,
    NoFeatureReader,
    NoPredictionSink,
    PredictionSink,
)
from falaj.serving.deployment_state import DeploymentState
from falaj.serving.runtime.batch_queue import BatchQueue, QueuedRequest
from falaj.serving.runtime.engine import ModelEngine
from falaj.serving.runtime.loading import load as load_file
from falaj.serving.runtime.run_statistics import CountedEngine

Array = npt.NDArray[Any]

BACKLOG = 1024

_log = logging.getLogger(__name__)


class ModelServer:
    """Serves a deployment. Created, started and stopped on one event loop."""

    def __init__(
        self,
        admission: Admission,
        *,
        features: FeatureReader | None = None,
        sink: PredictionSink | None = None,
        limits: ServerLimits | None = None,
        failures: AuthenticationFailures | None = None,
        load: Callable[[ServedFile], ModelEngine] = load_file,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.shares = ByteShares(self.limits.held_bytes)
        self.metrics = ServerMetrics(self.shares)
        self.connections: set[ServerConnection] = set()
        self.strangers: dict[ServerConnection, None] = {}
        self.callers: dict[str, dict[ServerConnection, None]] = {}
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time()
        self._sink: PredictionSink = sink or NoPredictionSink()
        self._pool = ThreadPoolExecutor(self.limits.threads, thread_name_prefix="model")
        self._deployment_state = DeploymentState(self._make_queue, load)
        self._dispatcher = Dispatcher(
            admission, features or NoFeatureReader(), self._sink, self.metrics, self.limits
        )
        self._grpc = GrpcService(self._dispatcher, admission, features or NoFeatureReader(), self.metrics)
        self.dispatch = self._dispatcher.dispatch
        self.compress = self._dispatcher.compress
        self.recognize = admission.recognize
        self.authenticate = self._dispatcher.authenticate
        self.authentication_failed = partial(
            (failures or NoAuthenticationFailures()).add, interface="model-server"
        )
        self._listening: list[asyncio.Server | TlsListener] = []
        self._sweeping: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket, *, tls: Tls | None = None) -> None:
        """Accept connections on `listener`; ready once a deployment is applied."""
        await self._listen(listener, partial(Connection, self), tls)
        self._sweep()

    async def start_grpc(self, listener: socket.socket, *, tls: Tls | None = None) -> None:
        """Accept connections of gRPC clients on `listener`."""
        await self._listen(listener, partial(GrpcConnection, self, self._grpc), tls, protocols=("h2",))

    async def _listen(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        tls: Tls | None,
        protocols: Sequence[str] = (),
    ) -> None:
        if tls is None:
            self._listening.append(await self._loop.create_server(make, sock=listener, backlog=BACKLOG))
        else:
            listener.listen(BACKLOG)
            tls_listener = TlsListener(listener, tls, make, protocols=protocols)
            tls_listener.start()
            self._listening.append(tls_listener)

    async def start_internal(self, listener: socket.socket, *, secret: str) -> None:
        """Accept connections of other platform processes on `listener`; they present `secret`, and name the caller."""
        self._listening.append(
            await self._loop.create_unix_server(
                lambda: Connection(self, internal=secret.encode()), sock=listener
            )
        )

    async def prepare(self, file: ServedFile, endpoint: Endpoint) -> None:
        """Load a model before the deployment that serves it for `endpoint`. Raise if it cannot be served."""
        await self._deployment_state.prepare(file, endpoint)

    async def apply(self, deployment: Deployment) -> None:
        """Serve `deployment`. If it cannot be loaded, raise and keep the current one."""
        try:
            await self._deployment_state.apply(deployment)
        except FalajError:
            self.metrics.reloads["refused"] += 1
            raise
        self.metrics.reloads["done"] += 1
        self._dispatcher.update(self._deployment_state.served)
        self._grpc.update()

    async def stop(self) -> None:
        """Stop accepting connections, answer pending requests and close; abort what is left after a timeout."""
        self.stopping = True
        self._dispatcher.ready = False
        self._grpc.update()
        for listening in self._listening:
            listening.close()
        for connection in list(self.connections):
            connection.close_when_idle()
        until = self._loop.time() + self.limits.stop_s
        while self.connections and self._loop.time() < until:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._dispatcher.close()
        self._deployment_state.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.sleep(0)  # lets aborted connections report their loss

    def _sweep(self) -> None:
        before, self.now = self.now, self._loop.time()
        late, now = self.now - before - 2 * self.limits.sweep_s, self.now
        if late > 0:  # the event loop was blocked; do not count that against clients
            for connection in self.connections:
                connection.deadline += late
        for connection in [c for c in self.connections if c.deadline < now]:
            connection.expire()
        self._sweeping = self._loop.call_later(self.limits.sweep_s, self._sweep)

    def _make_queue(self, engine: ModelEngine) -> BatchQueue:
        answered = None if isinstance(self._sink, NoPredictionSink) else self._record_batch
        pool = self._pool if engine.in_process else ThreadPoolExecutor(self.limits.threads)
        return BatchQueue(
            CountedEngine(engine),
            pool=pool,
            threads=self.limits.threads,
            answered=answered,
            most_waiting=self.limits.waiting,
        )

    def _record_batch(
        self,
        queue: BatchQueue,
        requests: Sequence[QueuedRequest],
        inputs: Sequence[Array],
        outputs: Sequence[Array],
    ) -> None:
        """Pass a batch to the prediction sink. A failure does not affect responses."""
        try:
            self._sink.add(predicted_batch(queue, cast(Sequence[Prediction], requests), inputs, outputs))
        except Exception:
            self.metrics.unlogged += 1
            if self.metrics.unlogged == 1:
                _log.exception("prediction log failed")


def listen(bind: str, port: int, *, tls: Tls | None = None, shared: bool = False) -> socket.socket:
    """Return a listening socket; beyond loopback only with TLS. `shared` lets several processes use one port."""
    checked = ServerConfig(bind=bind, port=port, tls=tls)
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((checked.bind, checked.port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
