"""A real HTTP server of the API on a free loopback port, in a thread of the test's process, and its users."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.routing import Route

from falaj.apps.api.app import RequestHandlers
from falaj.apps.api.server import _settings
from falaj.apps.http_server import HttpServer, listen
from falaj.apps.security_headers import HEADERS
from falaj.assembly.home import open_home
from falaj.assembly.platform import LocalPlatform as Assembled
from falaj.assembly.platform import assemble, local_caller
from falaj.control.services import Services, all_operations
from falaj.governance.operations.caller import acting_as
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import operations_of
from falaj.governance.policy.authorizer import Authorizer
from falaj.records.control.tls import Tls
from falaj.records.governance.identity import Role
from falaj.sdk.platform import Platform
from falaj.sdk.remote import connect
from platforms import URL_VARIABLE, Clock, configuration
from polling import PATIENCE_S, eventually
from probe import Probe

SECURITY = {name.lower(): value for name, value in HEADERS.items()}
TELLTALE = re.compile(r'Traceback|File \\?"|site-packages|/falaj/|\.py\b|", line \d', re.IGNORECASE)
"""Strings in a response that leaks internals."""


@dataclass
class ServedPlatform:
    """A served platform. Tokens: `admin` of the platform, `developer` in the workspace risk, `stranger`."""

    url: str
    parts: Assembled
    clock: Clock
    app: Any
    admin: str
    developer: str
    stranger: str
    _open: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def as_admin(self) -> httpx.Client:
        return self.http(self.admin)

    @cached_property
    def as_nobody(self) -> httpx.Client:
        return self.http(None)

    @cached_property
    def platform(self) -> Platform:
        """Return what `fj.connect` gives an administrator."""
        return self.connect(self.admin)

    def http(self, token: str | None, **options: Any) -> httpx.Client:
        """Return a plain HTTP client that checks the headers of every response, and that it leaks no internals."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        hooks = {"response": [self._inspect]}
        client = httpx.Client(
            base_url=self.url, headers=headers, event_hooks=hooks, timeout=PATIENCE_S, **options
        )
        return self._open.enter_context(client)

    def connect(self, token: str) -> Platform:
        return self._open.enter_context(connect(self.url, token))

    def issue(self, **options: Any) -> str:
        """Return the secret of a new token of the administrator."""
        return self.platform.tokens.issue(purpose="test", **options).secret

    def _inspect(self, response: httpx.Response) -> None:
        response.read()
        assert SECURITY.items() <= dict(response.headers).items(), response.headers
        if response.is_error:
            assert not TELLTALE.search(response.text), response.text
            assert str(self.parts.home.path) not in response.text


@dataclass(frozen=True)
class ServicesAndProbe(Services):
    probe: Probe


@contextmanager
def serve(folder: Path, *, url: str = "sqlite", toml: str = "") -> Iterator[ServedPlatform]:
    """Serve a platform in `folder` as its own process would, with the service `probe` added."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(URL_VARIABLE, url)
        home = open_home(folder / "home", folder / "config")
        home.toml.write_text(configuration(url, toml))
        clock = Clock()
        parts = with_probe(assemble(home, clock=clock))
        stack.callback(parts.close)
        settings = _settings(parts)
        handlers = RequestHandlers(parts)
        settings.app.router.routes.extend(
            Route(op.path, handlers.endpoint(op), methods=["GET", "POST"] if op.mode.reads else ["POST"])
            for op in operations_of(Probe).values()
        )
        address = stack.enter_context(running(settings, parts.config.server.tls))
        tokens = issue_tokens(parts)
        served = ServedPlatform(address, parts, clock, settings.app, **tokens)
        with served._open:
            yield served


def with_probe_known(gate: Gate) -> None:
    gate.authorizer = Authorizer([*all_operations().values(), *operations_of(Probe).values()])


def with_probe(parts: Assembled) -> Assembled:
    with_probe_known(parts.gate)
    return replace(parts, services=ServicesAndProbe(**vars(parts.services), probe=Probe(parts.gate)))


@contextmanager
def running(settings: uvicorn.Config, tls: Tls | None) -> Iterator[str]:
    """Run a server; yield its address."""
    listener = listen("127.0.0.1", "0")
    server = HttpServer(settings, tls=tls)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), name="api")
    thread.start()
    try:
        eventually(lambda: server.started)
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def issue_tokens(parts: Assembled) -> dict[str, str]:
    """Return tokens for the three users."""
    with acting_as(local_caller(parts.database)):
        create_people(parts.services)
        people = {"admin": None, "developer": "dana", "stranger": "sam"}
        issue = parts.services.tokens.issue
        return {who: issue(purpose="test", user=user).secret for who, user in people.items()}


def create_people(services: Services | Platform) -> None:
    """Create the workspace risk, dana who develops there, and sam who has no role."""
    services.workspaces.create("risk")
    services.users.create("dana")
    services.users.create("sam")
    services.workspaces.grant("risk", "dana", role=Role.DEVELOPER)
