"""Versions that a Triton server runs for an endpoint: where it is, and whether their data may go there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from falaj.assembly.drivers import open_egress
from falaj.errors import InvalidInput, ResidencyDenied
from falaj.governance.residency.zones import ZoneRegistry
from falaj.ports.egress import EgressAnswer
from falaj.records.config import Config
from falaj.records.governance.objects import StoredObject
from falaj.records.serving.endpoints import DeployedEndpoint, ServedFile
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

    def load(self, file: ServedFile) -> ModelEngine:
        """Ask Triton for the version, and probe it. Raise Unavailable if it has none."""
        if self._triton is None:
            raise InvalidInput.at(
                MISSING,
                given="nothing",
                allowed="the address of a Triton server, for an endpoint whose engine is triton",
                fix='[serving.triton]  url = "https://triton.example.com:8000"',
            )
        url = self._triton.url.rstrip("/")
        self._egress.require(url)
        within_s = LONGEST_S if file.settings.timeout_ms is None else file.settings.timeout_ms / 1000

        def ask(
            method: Literal["GET", "POST"], path: str, headers: Mapping[str, str], body: bytes
        ) -> EgressAnswer:
            return self._egress.ask(
                method, url + path, headers=headers, body=body, within_s=within_s, limit_bytes=ANSWER_BYTES
            )

        return probed(file, open_remote(file, ask))

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
