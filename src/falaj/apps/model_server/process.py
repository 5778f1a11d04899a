"""Run the model server of a platform until the parent ends or a signal arrives."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from falaj.apps.model_server.platform.admission import GateAdmission
from falaj.apps.model_server.platform.client import CountReporter, PlatformClient
from falaj.apps.model_server.platform.log_channel import RunningLog, StartLog
from falaj.apps.model_server.platform.log_process import LogReceiver, LogThread
from falaj.apps.model_server.platform.recorder import PredictionRecorder
from falaj.apps.model_server.platform.reload import DeploymentReloader
from falaj.apps.model_server.server import ModelServer
from falaj.apps.process_setup import stop_with_parent
from falaj.assembly.model_server import LocalListener, service_caller, version_opener
from falaj.assembly.platform import LocalPlatform
from falaj.records.governance.identity import Role
from falaj.serving.dependencies import NoPredictionSink
from falaj.serving.service import MODEL_SERVER
from falaj.serving.validation import require_still_servable

SWITCH_S = 0.001
"""Thread switch interval; the default of 5 ms would add to latency."""


class Listeners(NamedTuple):
    """The sockets of a model server: of REST, of processes of the platform, and of gRPC if it is on."""

    http: socket.socket
    local: LocalListener
    grpc: socket.socket | None = None


async def serve(
    platform: LocalPlatform,
    listeners: Listeners,
    *,
    ready: Callable[[str, str | None], None],
    until: Callable[[], Awaitable[object]],
    start_log: StartLog | None = None,
) -> None:
    """Serve the platform's endpoints until `until` returns; then have the prediction log store everything.

    `start_log` starts the log; by default in a thread.
    """
    account = service_caller(platform.gate, MODEL_SERVER, Role.OPERATOR)
    client = PlatformClient(platform, account)
    admission = GateAdmission(platform.gate, platform.authenticator, platform.gate.clock)
    every_s = platform.config.serving.log_every.total_seconds()
    logs = platform.config.serving.predictions == "log"
    log = (start_log or _log_in_thread(client, every_s)) if logs else None
    recorder = PredictionRecorder(log, every_s=every_s)
    sink = recorder if logs else NoPredictionSink()
    server = ModelServer(admission, features=client, sink=sink, failures=platform.failures, load=client.load)
    counters = CountReporter(client, server.metrics, recorder, lambda: admission.endpoints)
    recorder.periodic_tasks = (counters.report,)
    servable = partial(require_still_servable, platform.gate)
    opened = version_opener(platform.services)
    reloader = DeploymentReloader(
        platform.database, server, admission, recorder, opened, client.report_problems, servable
    )
    recorder.start()
    tls = platform.config.tls_of_serving
    await server.start(listeners.http, tls=tls)
    await server.start_internal(listeners.local.socket, secret=listeners.local.secret)
    if listeners.grpc is not None:
        await server.start_grpc(listeners.grpc, tls=tls)
    epoch_watch = asyncio.create_task(reloader.watch_epoch())
    reloading = asyncio.create_task(reloader.run())
    grpc = None if listeners.grpc is None else address_of(listeners.grpc)
    ready(url_of(listeners.http, secure=tls is not None), grpc)
    await until()
    reloading.cancel()
    await server.stop()
    epoch_watch.cancel()
    await recorder.stop()


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


def tune_interpreter() -> None:
    """Reduce pauses of the event loop by other threads and by the garbage collector; requests create no cycles.

    Changes the whole interpreter, so use it in a dedicated process only.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def url_of(listener: socket.socket, *, secure: bool) -> str:
    return f"{'https' if secure else 'http'}://{address_of(listener)}"


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"


async def wait_for_stop() -> None:
    """Return when the parent has ended or a signal arrives."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stop_with_parent(lambda: loop.call_soon_threadsafe(stop.set))
    await stop.wait()


def announce(**facts: str) -> bool:
    """Report the `url`, or the `problem` that keeps it from serving, to the parent; return false if there is none."""
    descriptor = os.environ.get("FALAJ_READY_FD")
    if descriptor is None:
        return False
    with os.fdopen(int(descriptor), "w") as parent:
        json.dump(facts, parent)
    return True


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` on uvloop if it is installed."""

    async def awaited() -> None:
        await main()

    try:
        import uvloop
    except ImportError:
        asyncio.run(awaited())
    else:
        uvloop.run(awaited())
