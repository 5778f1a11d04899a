"""The model server in a process: put together on a platform, until the parent ends or a signal comes."""

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

from falaj.apps.model_server.platform.admission import GateAdmission
from falaj.apps.model_server.platform.client import CountReporter, PlatformClient
from falaj.apps.model_server.platform.recorder import PredictionRecorder
from falaj.apps.model_server.platform.reload import DeploymentReloader
from falaj.apps.model_server.server import ModelServer
from falaj.apps.process_setup import stop_with_parent
from falaj.assembly.model_server import service_caller, version_opener
from falaj.assembly.platform import LocalPlatform
from falaj.records.governance.identity import Role
from falaj.serving.dependencies import NoPredictionSink
from falaj.serving.service import MODEL_SERVER
from falaj.serving.validation import require_still_servable

SWITCH_S = 0.001
"""After so long a thread that runs Python code lets another one go on; 5 ms, as usual, would be felt."""


async def serve(
    platform: LocalPlatform,
    listener: socket.socket,
    inner: socket.socket,
    *,
    ready: Callable[[str], None],
    until: Callable[[], Awaitable[object]],
) -> None:
    """Serve what the platform says, until `until` returns; then write down what is left."""
    account = service_caller(platform.gate, MODEL_SERVER, Role.OPERATOR)
    client = PlatformClient(platform, account)
    admission = GateAdmission(platform.gate, platform.authenticator, platform.gate.clock)
    every_s = platform.config.serving.log_every.total_seconds()
    log = PredictionRecorder(client.keep, every_s=every_s, collector=client.collector)
    sink = log if platform.config.serving.predictions == "log" else NoPredictionSink()
    server = ModelServer(admission, features=client, sink=sink, load=client.load)
    counters = CountReporter(client, server.metrics, log, lambda: admission.endpoints)
    log.after = (counters.report, client.hand_in_windows)
    servable = partial(require_still_servable, platform.gate)
    opened = version_opener(platform.services)
    follower = DeploymentReloader(
        platform.database, server, admission, log, opened, client.report_problems, servable
    )
    log.start()
    tls = platform.config.tls_of_serving
    await server.start(listener, tls=tls)
    await server.start_internal(inner)
    watching = asyncio.create_task(follower.watch_epoch())
    following = asyncio.create_task(follower.follow())
    ready(url_of(listener, secure=tls is not None))
    await until()
    following.cancel()
    await server.stop()
    watching.cancel()
    await asyncio.to_thread(log.stop)


def tune_interpreter() -> None:
    """Let the event loop wait little for other threads, and for the collector of cycles: requests make none.

    For a process that does nothing else: it changes the interpreter as a whole.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def url_of(listener: socket.socket, *, secure: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


async def wait_for_stop() -> None:
    """Returns when the parent is gone or a signal comes."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    stop_with_parent(lambda: loop.call_soon_threadsafe(told.set))
    await told.wait()


def announce(url: str) -> None:
    """Tell the parent, if it asked for that, where we answer."""
    descriptor = os.environ.get("FALAJ_READY_FD")
    if descriptor is not None:
        with os.fdopen(int(descriptor), "w") as parent:
            json.dump({"url": url}, parent)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` on uvloop where that is installed."""

    async def awaited() -> None:
        await main()

    try:
        import uvloop
    except ImportError:
        asyncio.run(awaited())
    else:
        uvloop.run(awaited())
