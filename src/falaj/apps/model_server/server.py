"""The model server: listens, sweeps deadlines, changes what it serves while it serves, and stops gently."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy.typing as npt

from falaj.apps.model_server.http.connection import Connection
from falaj.apps.model_server.inference.dispatch import Dispatcher
from falaj.apps.model_server.inference.prediction import Prediction, predicted_batch
from falaj.apps.model_server.limits import ServerLimits
from falaj.apps.model_server.metrics import ServerMetrics
from falaj.errors import FalajError
from falaj.records.config import ServerConfig, Tls
from falaj.records.serving import Deployment, Endpoint, ServedFile
from falaj.serving.dependencies import (
    Admission,
    FeatureReader,
    NoFeatureReader,
    NoPredictionSink,
    PredictionSink,
)
from falaj.serving.deployment_state import DeploymentState
from falaj.serving.runtime.batch_queue import BatchQueue, QueuedRequest
from falaj.serving.runtime.engine import ModelEngine
from falaj.serving.runtime.engine import load as load_file

Array = npt.NDArray[Any]

BACKLOG = 1024

_log = logging.getLogger(__name__)


class ModelServer:
    """Serves a deployment. Made, started and stopped on one event loop."""

    def __init__(
        self,
        admission: Admission,
        *,
        features: FeatureReader | None = None,
        sink: PredictionSink | None = None,
        limits: ServerLimits | None = None,
        load: Callable[[ServedFile], ModelEngine] = load_file,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.metrics = ServerMetrics()
        self.connections: set[Connection] = set()
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time()
        self._sink: PredictionSink = sink or NoPredictionSink()
        self._pool = ThreadPoolExecutor(self.limits.threads, thread_name_prefix="model")
        self._deployment_state = DeploymentState(self._make_queue, load)
        self._dispatcher = Dispatcher(
            admission, features or NoFeatureReader(), self._sink, self.metrics, self._pool
        )
        self.dispatch = self._dispatcher.dispatch
        self._listening: list[asyncio.Server] = []
        self._sweeping: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket, *, tls: Tls | None = None) -> None:
        """Answer on `listener`; ready once a deployment is applied."""
        context = None if tls is None else _tls(tls)
        self._listening.append(
            await self._loop.create_server(
                lambda: Connection(self), sock=listener, ssl=context, backlog=BACKLOG
            )
        )
        self._sweep()

    async def start_internal(self, listener: socket.socket) -> None:
        """Answer other processes of the platform on `listener`, which nobody else can reach: they name the caller."""
        self._listening.append(
            await self._loop.create_unix_server(lambda: Connection(self, internal=True), sock=listener)
        )

    async def prepare(self, file: ServedFile, endpoint: Endpoint) -> None:
        """Load a model ahead of the deployment that serves it for `endpoint`; the error says why it cannot be."""
        await self._deployment_state.prepare(file, endpoint)

    async def apply(self, deployment: Deployment) -> None:
        """Serve `deployment` from now on. If it cannot be loaded, all stays as it was, and the error says why."""
        try:
            await self._deployment_state.apply(deployment)
        except FalajError:
            self.metrics.reloads["refused"] += 1
            raise
        self.metrics.reloads["done"] += 1
        self._dispatcher.show(self._deployment_state.served)

    async def stop(self) -> None:
        """Take no more connections, answer what was asked, and close; after a while cut off what is left."""
        self.stopping = True
        self._dispatcher.ready = False
        for listening in self._listening:
            listening.close()
        for connection in list(self.connections):
            connection.retire()
        until = self._loop.time() + self.limits.stop_s
        while self.connections and self._loop.time() < until:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._dispatcher.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.sleep(0)  # lets aborted connections say that they are lost

    def _sweep(self) -> None:
        before, self.now = self.now, self._loop.time()
        late, now = self.now - before - 2 * self.limits.sweep_s, self.now
        if late > 0:  # the loop was held up, which no client is to blame for
            for connection in self.connections:
                connection.deadline += late
        for connection in [c for c in self.connections if c.deadline < now]:
            connection.expire()
        self._sweeping = self._loop.call_later(self.limits.sweep_s, self._sweep)

    def _make_queue(self, engine: ModelEngine) -> BatchQueue:
        answered = None if isinstance(self._sink, NoPredictionSink) else self._note
        return BatchQueue(
            engine,
            pool=self._pool,
            threads=self.limits.threads,
            answered=answered,
            most_waiting=self.limits.waiting,
        )

    def _note(
        self,
        queue: BatchQueue,
        requests: Sequence[QueuedRequest],
        inputs: Sequence[Array],
        outputs: Sequence[Array],
    ) -> None:
        """Hand a batch to the log. A log that fails costs no answer."""
        try:
            self._sink.add(predicted_batch(queue, cast(Sequence[Prediction], requests), inputs, outputs))
        except Exception:
            self.metrics.unlogged += 1
            if self.metrics.unlogged == 1:
                _log.exception("the prediction log does not take batches")


def listen(bind: str, port: int, *, tls: Tls | None = None, shared: bool = False) -> socket.socket:
    """A listening socket; beyond loopback only with TLS. `shared` lets several processes answer on one port."""
    checked = ServerConfig(bind=bind, port=port, tls=tls)
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((checked.bind, checked.port))
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _tls(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(tls.certificate, tls.key)
    return context
