"""Versions that a Triton server runs for an endpoint: where it is, and whether their data may go there."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Literal

from falaj.assembly.config import reveal
from falaj.assembly.drivers import open_egress
from falaj.errors import ConfigInvalid, InvalidInput, ResidencyDenied
from falaj.governance.residency.zones import ZoneRegistry
from falaj.ports.egress import EgressAnswer, EgressClient
from falaj.records.config import Config
from falaj.records.governance.objects import StoredObject
from falaj.records.serving.endpoints import DeployedEndpoint, ServedFile
from falaj.records.serving.triton import TritonConfig
from falaj.serving.runtime.engine import LONGEST_S, ModelEngine
from falaj.serving.runtime.engines.opened import probed
from falaj.serving.runtime.engines.triton import ANSWER_BYTES, open_remote

MISSING = "serving.triton"


class RemoteEngines:
    """Opens versions on the Triton server of falaj.toml."""

    def __init__(self, config: Config, zones: ZoneRegistry) -> None:
        self._triton = config.serving.triton
        self._egress = open_egress(config)
        self._zones = zones
        self._opening = threading.Lock()
        self._opened: tuple[EgressClient, frozenset[bytes]] | None = None

    def load(self, file: ServedFile) -> ModelEngine:
        """Ask Triton for the version, and probe it. Raise Unavailable if it has none."""
        if self._triton is None:
            raise InvalidInput.at(
                MISSING,
                given="nothing",
                allowed="the address of a Triton server, for an endpoint whose engine is triton",
                fix='[serving.triton]  url = "https://triton.example.com:8000"',
            )
        client, secrets = self._client(self._triton)
        within_s = LONGEST_S if file.settings.timeout_ms is None else file.settings.timeout_ms / 1000

        def ask(
            method: Literal["GET", "POST"], path: str, headers: Mapping[str, str], body: bytes
        ) -> EgressAnswer:
            answer = client.ask(
                method, path, headers=headers, body=body, within_s=within_s, limit_bytes=ANSWER_BYTES
            )
            return answer if answer.status == 200 else _without(answer, secrets)

        return probed(file, open_remote(file, ask))

    def _client(self, triton: TritonConfig) -> tuple[EgressClient, frozenset[bytes]]:
        """Return the client of the server, and the values that must not get into a log. All versions share it."""
        with self._opening:
            if self._opened is None:
                headers = {
                    name: _header_value(secret, field=f"{MISSING}.headers.{name}")
                    for name, secret in triton.headers.items()
                }
                if triton.token is not None:
                    token = _header_value(triton.token, field=f"{MISSING}.token")
                    headers["Authorization"] = f"Bearer {token}"
                url = triton.url.rstrip("/")
                client = self._egress.connect(url, headers=headers, ca=triton.ca, most=triton.connections)
                values = {value.removeprefix("Bearer ").encode() for value in headers.values()}
                self._opened = client, frozenset(values)
            return self._opened

    def close(self) -> None:
        """Close the connections to the server."""
        with self._opening:
            if self._opened is not None:
                self._opened[0].close()

    def require_permitted(self, version: StoredObject, served: DeployedEndpoint) -> None:
        """Raise ResidencyDenied if requests for a version would go to a server where its data may not lie."""
        if served.settings.engine != "triton" or self._triton is None:
            return
        zone = self._zones.here if self._triton.zone is None else self._zones.named(self._triton.zone)
        for label, name in ((version.label, version.name), (served.label, served.name)):
            if not label.permits(zone.jurisdiction):
                raise ResidencyDenied(
                    f"{name} is labelled {label.describe()}, and Triton runs in zone {zone.name} ({zone.jurisdiction})"
                )


def _header_value(secret: str, *, field: str) -> str:
    """Return a secret that can be the value of a header."""
    value = reveal(secret, field=field)
    if not (value.isascii() and value.isprintable() and value.strip()):
        raise ConfigInvalid.at(field, given="(not shown)", allowed="one line of printable ASCII characters")
    return value


def _without(answer: EgressAnswer, secrets: Collection[bytes]) -> EgressAnswer:
    """Return a refusal without the secrets that it may repeat: its words are shown, and logged."""
    body = answer.body
    for secret in secrets:
        body = body.replace(secret, b"***")
    return answer._replace(body=body)
