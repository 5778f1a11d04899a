"""Run the model server of a platform until the parent ends or a signal arrives."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import uvloop

from falaj.apps.model_server.http.access import access_of
from falaj.apps.model_server.limits import ServerLimits, limits_of, limits_of_replica
from falaj.apps.model_server.load_meter import LoadMeter
from falaj.apps.model_server.platform.admission import GateAdmission
from falaj.apps.model_server.platform.client import CountReporter, PlatformClient
from falaj.apps.model_server.platform.log_channel import RunningLog, StartLog
from falaj.apps.model_server.platform.log_process import LogReceiver, LogThread
from falaj.apps.model_server.platform.recorder import PredictionRecorder
from falaj.apps.model_server.platform.reload import DeploymentReloader
from falaj.apps.model_server.platform.shared_buckets import SharedBuckets
from falaj.apps.model_server.replica import Accept, ParentChannel, ReplicaFacts, SharedSockets
from falaj.apps.model_server.replica_metrics import ReplicaMetrics
from falaj.apps.model_server.server import ModelServer
from falaj.apps.model_server.tracing.export import TraceExporter
from falaj.apps.model_server.tracing.spans import Tracer
from falaj.apps.process_setup import reduce_collections, stop_with_parent
from falaj.assembly.drivers import open_egress
from falaj.assembly.model_server import (
    LocalListener,
    local_secret,
    service_caller,
    version_opener,
)
from falaj.assembly.platform import LocalPlatform
from falaj.records.config import Config
from falaj.records.control.tls import Tls
from falaj.records.governance.identity import Role
from falaj.serving.dependencies import NoPredictionSink
from falaj.serving.service import MODEL_SERVER

SWITCH_S = 0.001
"""Thread switch interval; the default of 5 ms would add to latency."""
REPORT_S = 1.0
"""How often a replica reports its load."""


@dataclass(frozen=True)
class RunningServer:
    """A model server whose deployments are being reloaded; it accepts no connections by itself."""

    server: ModelServer
    tls: Tls | None
    loaded: asyncio.Event
    """Set when the models were loaded, or could not be."""


async def serve(
    platform: LocalPlatform,
    listener: socket.socket,
    inner: LocalListener,
    *,
    ready: Callable[[str], None],
    until: Callable[[], Awaitable[object]],
    grpc: socket.socket | None = None,
    start_log: StartLog | None = None,
) -> None:
    """Serve the platform's endpoints until `until` returns; then have the prediction log store everything.

    `start_log` starts the log; by default in a thread.
    """
    async with running_server(platform, start_log=start_log) as running:
        await running.server.start(listener, tls=running.tls)
        await running.server.start_internal(inner.socket, secret=inner.secret)
        if grpc is not None:
            running.server.accept_grpc(grpc, tls=running.tls)
        ready(url_of(listener, secure=running.tls is not None))
        await until()


@asynccontextmanager
async def running_server(
    platform: LocalPlatform,
    limits: ServerLimits | None = None,
    *,
    start_log: StartLog | None = None,
    replica: str = "0",
) -> AsyncIterator[RunningServer]:
    """Run a model server of the platform; then stop it, and have the prediction log store everything."""
    account = service_caller(platform.gate, MODEL_SERVER, Role.OPERATOR)
    client = PlatformClient(platform, account)
    admission = GateAdmission(platform.gate, platform.authenticator, platform.gate.clock)
    every_s = platform.config.serving.log_every.total_seconds()
    logs = platform.config.serving.predictions == "log"
    log = (start_log or _log_in_thread(client, every_s)) if logs else None
    recorder = PredictionRecorder(log, every_s=every_s)
    sink = recorder if logs else NoPredictionSink()
    exporter = trace_exporter(platform.config, replica=replica)
    tracer = None if exporter is None else Tracer(exporter, share=platform.config.serving.tracing.share)
    server = ModelServer(
        admission,
        features=client,
        sink=sink,
        failures=platform.failures,
        load=client.load,
        limits=limits or limits_of(platform.config.serving),
        access=access_of(platform.config.serving),
        tracer=tracer,
        read_arrow=client.read_arrow,
    )
    counters = CountReporter(client, server.metrics, recorder, lambda: admission.endpoints, server.shadows)
    recorder.periodic_tasks = (counters.report,)
    opened = version_opener(platform.services)
    reloader = DeploymentReloader(
        platform.database,
        server,
        admission,
        recorder,
        opened,
        client.report_versions,
        client.require_servable,
    )
    recorder.start()
    server.metrics.replica = replica
    if exporter is not None:
        server.metrics.traces = exporter.outcomes
        exporter.start()
    epoch_watch = asyncio.create_task(reloader.watch_epoch())
    reloading = asyncio.create_task(reloader.run())
    try:
        yield RunningServer(server, platform.config.tls_of_serving, reloader.loaded)
    finally:
        reloading.cancel()
        await server.stop()
        epoch_watch.cancel()
        await recorder.stop()
        client.remote.close()
        if exporter is not None:
            await asyncio.to_thread(exporter.stop)


def _log_in_thread(client: PlatformClient, every_s: float) -> StartLog:
    def start(connection: socket.socket) -> RunningLog:
        receiver = LogReceiver(
            connection,
            client.store_batch,
            every_s=every_s,
            collector=client.collector,
            periodic=client.deliver_windows,
        )
        return LogThread(receiver, connection)

    return start


async def serve_replica(
    platform: LocalPlatform, facts: ReplicaFacts, *, start_log: StartLog | None = None
) -> None:
    """Serve as a replica of the processes driver until the parent says stop, or ends."""
    async with running_server(
        platform, limits_of_replica(platform.config.serving), start_log=start_log, replica=facts.name
    ) as running:
        server = running.server
        if (config := platform.config.serving.replicas).most > 1 or not config.min:
            folder = platform.home.replica_state
            server.metrics.peers = ReplicaMetrics(folder, facts.name)
            server.share_limits(SharedBuckets(folder / "rates"))
        accept: dict[str, Accept] = {
            "http": partial(server.accept, tls=running.tls),
            "grpc": partial(server.accept_grpc, tls=running.tls),
            "local": partial(server.accept_internal, secret=local_secret(platform.home)),
        }
        sockets, channel = SharedSockets(facts.sockets, accept), ParentChannel(facts.reports)
        channel.open()
        reporting = asyncio.create_task(_report(running, channel))
        replicas = 0
        while "stop" not in (message := await channel.messages.get()):
            sockets.accept_from(message["accept"])
            if replicas and message["replicas"] > replicas:
                server.release_connections()
            replicas = message["replicas"]
        sockets.close()
        reporting.cancel()
        if message["stop"]:
            await server.drain(message["stop"])
        server.metrics.store()


async def _report(running: RunningServer, channel: ParentChannel) -> None:
    """Report the state, and the load every second."""
    channel.report(state="loading")
    await running.loaded.wait()
    tune_interpreter()
    channel.report(state="ready")
    meter = LoadMeter(running.server.metrics)
    while True:
        await asyncio.sleep(REPORT_S)
        channel.report(load=meter.read(running.server.in_flight).model_dump(mode="json"))
        running.server.metrics.store()


def trace_exporter(config: Config, *, replica: str = "0") -> TraceExporter | None:
    """Return the exporter of traces, if the operator has named a collector. Raise InvalidInput if it is not allowed."""
    url = config.serving.tracing.endpoint
    if url is None:
        return None
    egress = open_egress(config)
    egress.require(url)
    headers = {"Content-Type": "application/json"}
    return TraceExporter(
        lambda body: egress.post(url, headers=headers, body=body, admit=lambda address: None), replica=replica
    )


def tune_interpreter() -> None:
    """Reduce pauses of the event loop by other threads and by the garbage collector; requests create no cycles.

    Changes the whole interpreter, so use it in a dedicated process only.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    reduce_collections()


def url_of(listener: socket.socket, *, secure: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


async def wait_for_stop() -> None:
    """Return when the parent has ended or a signal arrives."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stop_with_parent(lambda: loop.call_soon_threadsafe(stop.set))
    await stop.wait()


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` on uvloop."""

    async def awaited() -> None:
        await main()

    uvloop.run(awaited())
