"""The model server of a home: how other processes reach it, and what it gets of the services."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from falaj.assembly.home import Home
from falaj.control.services import Services
from falaj.errors import FalajError, Unavailable, rebuild
from falaj.governance import bootstrap, objects
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.gate import Gate
from falaj.records.features import OnlineRows
from falaj.records.governance.identity import Role
from falaj.records.names import ROOT, PrincipalId
from falaj.serving.dependencies import LoadVersion

LONGEST_SOCKET_PATH = 100
"""Bytes; the system takes little more."""
ANSWER_S = 30.0


class LocalModelServer:
    """The model server of the same `falaj up`, reached by a socket that only the owner of the home can open."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def url(self) -> str | None:
        found = self._home.platform().get("models")
        return None if found is None else str(found)

    def grpc_address(self) -> str | None:
        found = self._home.platform().get("models_grpc")
        return None if found is None else str(found)

    def problem(self) -> str | None:
        found = self._home.platform().get("models_problem")
        return None if found is None else str(found)

    def wake(self) -> None:
        self._home.serving.touch(mode=0o600)

    def require_engine(self) -> None:
        if find_spec("onnxruntime") is None or find_spec("msgspec") is None:
            raise Unavailable("models cannot be served by this installation; pip install 'falaj[serve]'")

    def infer(self, path: str, caller: str, body: bytes) -> bytes:
        import httpx

        try:
            published = json.loads(self._home.model_server.read_text())
            headers = {"Falaj-Caller": caller, "Falaj-Secret": str(published["secret"])}
            transport = httpx.HTTPTransport(uds=published["socket"])
            with httpx.Client(transport=transport, timeout=ANSWER_S) as client:
                answer = client.post(f"http://model-server{path}", content=body, headers=headers)
        except (OSError, ValueError, KeyError, httpx.TransportError):
            raise Unavailable("the model server does not run, or not yet; 'falaj up' starts it") from None
        if answer.status_code != 200:
            raise _refusal(answer.json())
        return answer.content


def _refusal(response: dict[str, str]) -> FalajError:
    return rebuild(response.get("code", "internal"), response.get("error", "the model server failed"), [], {})


class LocalListener(NamedTuple):
    """A local socket, and the secret that its clients present.

    A job under Landlock can connect to every socket of the platform's user, but cannot read files of the home.
    """

    socket: socket.socket
    secret: str


@contextmanager
def publish_local_socket(home: Home) -> Iterator[LocalListener]:
    """Listen on a local socket for the other processes of `home`; publish its path and secret in a file there."""
    secret = secrets.token_urlsafe(32)
    path = home.path / "models.sock"
    folder: Path | None = None
    if len(str(path).encode()) > LONGEST_SOCKET_PATH:
        folder = Path(tempfile.mkdtemp(prefix="falaj-"))  # 0700, like the home
        path = folder / "models.sock"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
        listener.setblocking(False)
        draft = home.model_server.with_suffix(".new")
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600)
        draft.write_text(json.dumps({"socket": str(path), "secret": secret}))
        draft.rename(home.model_server)
        try:
            yield LocalListener(listener, secret)
        finally:
            home.model_server.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            if folder is not None:
                with suppress(OSError):
                    shutil.rmtree(folder)


def service_caller(gate: Gate, name: str, role: Role) -> Caller:
    """Return the platform's own service account `name`; create it, with role and audit entry, if missing."""
    with gate.database.read() as tx:
        account = objects.by_name(tx, workspace=ROOT, kind="service", name=name)
    if account is None:
        with gate.database.write() as plain:
            tx = gate.audit.recording(plain)
            account = bootstrap.create_service_account(tx, name, role, now=gate.clock())
            bootstrap.record_service_account(tx, gate.audit, name=name, now=gate.clock())
    return Caller(PrincipalId(account.id), account.name, "service", "local")


def version_opener(services: Services) -> LoadVersion:
    """Return the function that opens registered versions inside a transaction of the caller."""
    return services.models.open_version


def read_online(services: Services, view: str, keys: Sequence[str]) -> OnlineRows:
    """Return the newest features of each key, for a caller that the gate has authorized."""
    return services.features.online_features.read(view, keys, clock=services.features.gate.clock)
