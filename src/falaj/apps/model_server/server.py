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
from falaj.apps.model_server.connections import ServerConnection
from falaj.apps.model_server.grpc.connection import GrpcConnection
from falaj.apps.model_server.grpc.service import GrpcService
from falaj.apps.model_server.http.access import HttpAccess
from falaj.apps.model_server.http.connection import Connection
from falaj.apps.model_server.inference.dispatch import Dispatcher
from falaj.apps.model_server.inference.plain_rows.formats import ReadArrow
from falaj.apps.model_server.inference.prediction import Prediction, predicted_batch
from falaj.apps.model_server.inference.shadow import ShadowRunner
from falaj.apps.model_server.limits import ServerLimits
from falaj.apps.model_server.metrics import ServerMetrics
from falaj.apps.model_server.tracing.spans import Tracer
from falaj.apps.socket_listener import SocketListener
from falaj.apps.tls_listener import TlsListener
from falaj.errors import FalajError
from falaj.records.config import ServerConfig
from falaj.records.control.tls import Tls
from falaj.records.serving.endpoints import Deployment, Endpoint, ServedFile
from falaj.records.serving.settings import MeasuredVersion, ServingSettings
from falaj.serving.dependencies import (
    Admission,
    AuthenticationFailures,
    FeatureReader,
    NoAuthenticationFailures,
    NoFeatureReader,
    NoPredictionSink,
    PredictedBatch,
    PredictionSink,
)
from falaj.serving.deployment_state import DeploymentState
from falaj.serving.runtime.batch_queue import BatchQueue, QueuedRequest
from falaj.serving.runtime.engine import LONGEST_S, ModelEngine
from falaj.serving.runtime.ensembles.engine import EnsembleEngine
from falaj.serving.runtime.loading import load as load_file
from falaj.serving.runtime.metering import MeteredEngine
from falaj.serving.runtime.rate_limits import Buckets

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
        access: HttpAccess | None = None,
        read_arrow: ReadArrow | None = None,
        failures: AuthenticationFailures | None = None,
        load: Callable[[ServedFile], ModelEngine] = load_file,
        tracer: Tracer | None = None,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.access = access or HttpAccess()
        self.shares = ByteShares(self.limits.held_bytes)
        self.metrics = ServerMetrics(self.shares)
        self.connections: set[ServerConnection] = set()
        self.strangers: dict[ServerConnection, None] = {}
        self.callers: dict[str, dict[ServerConnection, None]] = {}
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time()
        self._sink: PredictionSink = sink or NoPredictionSink()
        self._is_logging = not isinstance(self._sink, NoPredictionSink)
        self.shadows = ShadowRunner(self._sink, self.metrics.shadow_outcomes)
        self._deployment_state = DeploymentState(self._make_queue, load)
        self._dispatcher = Dispatcher(
            admission,
            features or NoFeatureReader(),
            self._sink,
            self.metrics,
            self.limits,
            tracer=tracer,
            read_arrow=read_arrow,
            answered=self._log_batch if self._is_logging else None,
        )
        self._grpc = GrpcService(
            self._dispatcher,
            admission,
            features or NoFeatureReader(),
            self.metrics,
            tracer=tracer,
            is_readiness_public=self.access.public_readiness,
        )
        self.dispatch = self._dispatcher.dispatch
        self.compress = self._dispatcher.compress
        self.recognize = admission.recognize
        self.authenticate = self._dispatcher.authenticate
        self.authentication_failed = partial(
            (failures or NoAuthenticationFailures()).add, interface="model-server"
        )
        self._listening: list[SocketListener | TlsListener] = []
        self._sweeping: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket, *, tls: Tls | None = None) -> None:
        """Accept connections on `listener`; ready once a deployment is applied."""
        self.accept(listener, tls=tls)

    async def start_internal(self, listener: socket.socket, *, secret: str) -> None:
        """Accept connections of other platform processes on `listener`; they present `secret`, and name the caller."""
        self.accept_internal(listener, secret=secret)

    def accept(self, listener: socket.socket, *, tls: Tls | None = None) -> SocketListener | TlsListener:
        """Accept connections on `listener` until what is returned is released."""
        return self._accept(listener, partial(Connection, self), tls)

    def accept_grpc(self, listener: socket.socket, *, tls: Tls | None = None) -> SocketListener | TlsListener:
        """Accept connections of gRPC clients until what is returned is released."""
        return self._accept(listener, partial(GrpcConnection, self, self._grpc), tls, protocols=("h2",))

    def accept_internal(self, listener: socket.socket, *, secret: str) -> SocketListener | TlsListener:
        """Accept connections of other platform processes until what is returned is released."""
        return self._accept(listener, partial(Connection, self, internal=secret.encode()), None)

    def _accept(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        tls: Tls | None,
        protocols: Sequence[str] = (),
    ) -> SocketListener | TlsListener:
        if self._sweeping is None:
            self._sweep()
        made = (
            SocketListener(listener, make)
            if tls is None
            else TlsListener(listener, tls, make, protocols=protocols)
        )
        made.start()
        self._listening.append(made)
        return made

    @property
    def in_flight(self) -> int:
        """Return the number of requests that are not answered yet."""
        return sum(connection.pending for connection in self.connections)

    def share_limits(self, buckets: Buckets) -> None:
        """Count the requests of callers together with other replicas."""
        self._dispatcher.rates.buckets = buckets

    def release_connections(self) -> None:
        """Close each connection after its next response: its client connects again, maybe to another replica."""
        for connection in list(self.connections):
            connection.close_after_response()

    async def drain(self, grace_s: float) -> None:
        """Answer, and close each connection after its next response; return when all are, or after `grace_s`."""
        self.stopping = True
        self.release_connections()
        until = self._loop.time() + grace_s
        while self._loop.time() < until and (
            self.connections or any(each.opening for each in self._listening)
        ):
            await asyncio.sleep(0.01)

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
        self.shadows.update(self._deployment_state.served)

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
        await asyncio.to_thread(self.shadows.stop)
        self._deployment_state.close()
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

    def measured(self, file: ServedFile) -> MeasuredVersion | None:
        """Return how a version runs, if it is loaded."""
        queue = self._deployment_state.queue_of(file)
        return None if queue is None else queue.measured(file)

    def _make_queue(self, engine: ModelEngine, settings: ServingSettings) -> BatchQueue:
        metered = MeteredEngine(engine)
        instances = settings.instances or self.limits.threads
        # each has threads of its own: a model whose runs take long keeps no other from running
        queue = BatchQueue(
            metered,
            pool=ThreadPoolExecutor(instances, thread_name_prefix="model"),
            threads=instances,
            answered=self._record_batch,
            most_waiting=self.limits.waiting,
            max_queue_s=None if settings.max_queue_ms is None else settings.max_queue_ms / 1000,
            batch_delay_s=(settings.batch_delay_ms or 0) / 1000,
            timeout_s=LONGEST_S if settings.timeout_ms is None else settings.timeout_ms / 1000,
        )
        self.metrics.meters[queue] = metered
        if isinstance(engine, EnsembleEngine):
            self.metrics.ensembles[queue] = engine
        return queue

    def _record_batch(
        self,
        queue: BatchQueue,
        requests: Sequence[QueuedRequest],
        inputs: Sequence[Array],
        outputs: Sequence[Array],
    ) -> None:
        """Pass a batch to the prediction sink and to shadows. A failure does not affect responses."""
        if self.shadows.plans:
            predictions = cast(Sequence[Prediction], requests)
            self.shadows.offer(queue, predictions, inputs, outputs, self.metrics.meters[queue].last_run_s)
        if self._is_logging:
            self._log_batch(predicted_batch(queue, cast(Sequence[Prediction], requests), inputs, outputs))

    def _log_batch(self, batch: PredictedBatch) -> None:
        try:
            self._sink.add(batch)
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
