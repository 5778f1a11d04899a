"""The model server of a home: how other processes reach it, and what it gets of the services."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from falaj.assembly.home import Home
from falaj.control.services import Services
from falaj.drivers.processes.replicas import ProcessReplicas
from falaj.drivers.processes.replicas import sockets_needed as sockets_needed
from falaj.errors import AlreadyExists, FalajError, NotFound, Unavailable, rebuild
from falaj.governance import bootstrap, objects
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.gate import Gate
from falaj.ports.replicas import ReplicaDriver
from falaj.records.control.replicas import Replica, ServerReplicas
from falaj.records.features import OnlineRows
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT, PrincipalId
from falaj.records.registry import FileFormat
from falaj.records.serving.statistics import ServerLoad
from falaj.serving.dependencies import LOAD_PATH, LoadVersion
from falaj.serving.runtime.formats import require_installed

LONGEST_SOCKET_PATH = 100
"""Bytes; the system takes little more."""
ANSWER_S = 30.0
LOAD_S = 5.0
"""How long the model server may take to answer, and to tell what it does now."""


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

    def replicas(self) -> ServerReplicas:
        status = self._home.platform().get("replicas")
        try:
            found = json.loads(self._home.replicas.read_text()) if status is not None else []
            return ServerReplicas.model_validate({"status": status, "replicas": found})
        except (OSError, ValueError):
            return ServerReplicas(status=status)

    def restart(self) -> None:
        if self._home.platform().get("replicas") is None:
            raise Unavailable("the model server does not run; 'falaj deploy' starts it under 'falaj up'")
        draft = self._home.serving.with_suffix(".new")
        draft.write_text(secrets.token_hex(8))
        draft.chmod(0o600)
        draft.rename(self._home.serving)

    def require_engine(self, formats: Collection[FileFormat]) -> None:
        require_installed(formats)

    def load(self) -> ServerLoad:
        """Return what the replicas do; the one that answers knows of the others."""
        return ServerLoad.model_validate_json(self._ask("GET", LOAD_PATH, "", b"", within_s=LOAD_S))

    def infer(self, path: str, caller: str, body: bytes) -> bytes:
        return self._ask("POST", path, caller, body, within_s=ANSWER_S)

    def _ask(self, method: str, path: str, caller: str, body: bytes, *, within_s: float) -> bytes:
        import httpx

        try:
            published = json.loads(self._home.model_server.read_text())
            headers = {"Falaj-Caller": caller, "Falaj-Secret": str(published["secret"])}
            transport = httpx.HTTPTransport(uds=published["socket"])
            with httpx.Client(transport=transport, timeout=within_s) as client:
                answer = client.request(method, f"http://model-server{path}", content=body, headers=headers)
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


def local_secret(home: Home) -> str:
    """Return the secret that clients of the local socket of `home` present."""
    return str(json.loads(home.model_server.read_text())["secret"])


def process_replicas(
    home: Home, sockets: Mapping[str, Sequence[socket.socket]], *, output: int
) -> ReplicaDriver:
    """Return the driver that runs replicas of the model server of `home` as processes, which write to `output`."""
    shutil.rmtree(home.replica_state, ignore_errors=True)  # counters begin with the platform
    home.replica_state.mkdir(mode=0o700, exist_ok=True)
    environment = os.environ | {"FALAJ_HOME": str(home.path), "FALAJ_CONFIG_DIR": str(home.config_dir)}
    command = [sys.executable, "-m", "falaj.apps.model_server"]
    return ProcessReplicas(command, sockets=sockets, environment=environment, output=output)


def gpu_devices() -> Sequence[Path]:
    """Return the device files of the machine's GPUs, which the worker of a model may open; none without a GPU."""
    from falaj.drivers.processes.gpus import machine_devices

    return machine_devices()


def publish_replicas(home: Home, replicas: Sequence[Replica]) -> None:
    """Publish the replicas of the model server for other processes of `home`. A full disk is no reason to stop."""
    draft = home.replicas.with_suffix(".new")
    with suppress(OSError):
        draft.write_text(json.dumps([each.model_dump(mode="json") for each in replicas]))
        draft.rename(home.replicas)


def service_caller(gate: Gate, name: str, role: Role) -> Caller:
    """Return the platform's own service account `name`; create it, with role and audit entry, if missing."""
    account = _account(gate, name)
    if account is None:
        with suppress(AlreadyExists), gate.database.write() as plain:  # by another replica, just now
            tx = gate.audit.recording(plain)
            bootstrap.create_service_account(tx, name, role, now=gate.clock())
            bootstrap.record_service_account(tx, gate.audit, name=name, now=gate.clock())
        account = _account(gate, name)
    if account is None:
        raise NotFound(f"there is no service account {name!r}")
    return Caller(PrincipalId(account.id), account.name, "service", "local")


def _account(gate: Gate, name: str) -> StoredObject | None:
    with gate.database.read() as tx:
        return objects.by_name(tx, workspace=ROOT, kind="service", name=name)


def version_opener(services: Services) -> LoadVersion:
    """Return the function that opens registered versions inside a transaction of the caller."""
    return services.models.open_version


def read_online(services: Services, view: str, keys: Sequence[str]) -> OnlineRows:
    """Return the newest features of each key, for a caller that the gate has authorized."""
    return services.features.online_features.read(view, keys, clock=services.features.gate.clock)
