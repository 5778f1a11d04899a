"""Follows the platform: what is to be served, and the policy epoch, as they change in the database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from falaj.apps.model_server.platform.admission import GateAdmission
from falaj.apps.model_server.platform.recorder import PredictionRecorder, PredictionSource, VersionKey
from falaj.apps.model_server.server import ModelServer
from falaj.errors import FalajError, KeyUnavailable, ResidencyDenied
from falaj.governance import objects
from falaj.governance.policy.epochs import current_epoch
from falaj.ports.metadata import Database, Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.serving import DeployedEndpoint, Deployment, Endpoint, LoadProblem, Route, ServedFile
from falaj.serving import store
from falaj.serving.dependencies import LoadVersion
from falaj.serving.lookups import feature_names
from falaj.serving.service import endpoint_path

T = TypeVar("T")

POLL_S = 0.2
RETRY_S = 10.0
"""How long a version that could not be loaded is left alone."""

Servable = Callable[[Transaction, StoredObject, DeployedEndpoint], None]
"""Raises if a version may no longer be served for an endpoint."""

Tell = Callable[[str, tuple[LoadProblem, ...]], None]
"""Reports to the platform which versions of an endpoint cannot be served, and which can again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DesiredEndpoint:
    """An endpoint as the platform wants it, its versions' files, and why there is none for the others.

    `barred` are those that must not be served, even if they are loaded: the rules or their keys say so.
    """

    deployed: DeployedEndpoint
    endpoint: Endpoint
    files: dict[str, ServedFile]
    problems: dict[str, str]
    barred: set[str]


@dataclass
class DeploymentReloader:
    """Brings the server to what the database says, version by version: one that fails leaves the rest as it is."""

    database: Database
    server: ModelServer
    admission: GateAdmission
    log: PredictionRecorder
    versions: LoadVersion
    report_problems: Tell
    servable: Servable
    _known: tuple[int, int] = (-1, -1)
    _retry_at: float = float("inf")
    _serving: dict[str, tuple[Endpoint, dict[str, ServedFile]]] = field(default_factory=dict)
    _told: dict[VersionKey, str | None] = field(default_factory=dict)

    async def follow(self) -> None:
        """Until cancelled; what cannot be read now is read a moment later.

        The epoch moves too when a label changes or a key is destroyed.
        """
        while True:
            try:
                known = await asyncio.to_thread(
                    self._read, lambda tx: (store.revision(tx), current_epoch(tx))
                )
                if known != self._known or time.monotonic() >= self._retry_at:
                    await self.sync()
                    self._known = known
            except Exception:
                _log.exception("what is to be served cannot be read; it is tried again")
            await asyncio.sleep(POLL_S)

    async def watch_epoch(self) -> None:
        """Keep decisions usable, also while models are being loaded; until cancelled."""
        while True:
            try:
                self.admission.observe(await asyncio.to_thread(self._read, current_epoch))
            except Exception:
                _log.exception("the policy epoch cannot be read; it is tried again")
            await asyncio.sleep(POLL_S)

    async def sync(self) -> None:
        """Serve what the database says now. Where no version of an endpoint can be served, the earlier ones stay."""
        wanted = await asyncio.to_thread(self._wanted)
        serving: dict[str, tuple[Endpoint, dict[str, ServedFile]]] = {}
        for each in wanted:
            found = await self._loaded(each) or self._earlier(each)
            if found is not None:
                serving[each.deployed.id] = found
        files = {file: None for _, own in serving.values() for file in own.values()}
        endpoints = tuple(endpoint for endpoint, _ in serving.values())
        self.log.sources = {**self.log.sources, **_sources(serving)}
        self.admission.endpoints = {endpoint.name: str(endpoint.id) for endpoint in endpoints}
        await self.server.apply(Deployment(models=tuple(files), endpoints=endpoints))
        self._serving = serving
        failing = any(each.problems for each in wanted)
        self._retry_at = time.monotonic() + RETRY_S if failing else float("inf")
        await asyncio.to_thread(self._tell, wanted)

    def _earlier(self, wanted: DesiredEndpoint) -> tuple[Endpoint, dict[str, ServedFile]] | None:
        """What is served now, unless that must not be."""
        found = self._serving.get(wanted.deployed.id)
        return None if found is None or wanted.barred & found[1].keys() else found

    async def _loaded(self, wanted: DesiredEndpoint) -> tuple[Endpoint, dict[str, ServedFile]] | None:
        """The endpoint with those of its versions that can be served; none if requests would have nowhere to go."""
        files = {}
        for version, file in wanted.files.items():
            try:
                await self.server.prepare(file, wanted.endpoint)
                files[version] = file
            except FalajError as error:
                wanted.problems[version] = str(error)
                _log.error("%s@%s is not served: %s", file.model, version, error)
        routes = tuple(route for route in wanted.endpoint.routes if route.version in files)
        if not any(route.weight for route in routes):
            return None
        return wanted.endpoint.model_copy(update={"routes": routes}), files

    def _tell(self, wanted: Sequence[DesiredEndpoint]) -> None:
        """Report what has changed about which versions are served."""
        for each in wanted:
            now = {version: each.problems.get(version) for version in (*each.files, *each.problems)}
            before = {route.version: route.problem for route in each.deployed.routes}
            changed = {
                version: problem
                for version, problem in now.items()
                if self._told.get((each.deployed.id, version), before.get(version)) != problem
            }
            if changed:
                told = tuple(LoadProblem(version=v, problem=p and p[:4000]) for v, p in changed.items())
                self.report_problems(each.deployed.id, told)
                self._told |= {(each.deployed.id, version): problem for version, problem in changed.items()}

    # ---------------------------------------------------------------------------------- in a thread

    def _read(self, query: Callable[[Transaction], T]) -> T:
        with self.database.read() as tx:
            return query(tx)

    def _wanted(self) -> list[DesiredEndpoint]:
        with self.database.read() as tx:
            return [self._one(tx, each) for each in store.all_endpoints(tx)]

    def _one(self, tx: Transaction, deployed: DeployedEndpoint) -> DesiredEndpoint:
        files: dict[str, ServedFile] = {}
        problems: dict[str, str] = {}
        barred: set[str] = set()
        for route in deployed.routes:
            try:
                files[route.version] = self._file(tx, route.id, route.version, deployed)
            except (ResidencyDenied, KeyUnavailable) as error:
                problems[route.version] = str(error)
                barred.add(route.version)
            except FalajError as error:
                problems[route.version] = str(error)
        models = {file.model for file in files.values()}
        endpoint = Endpoint(
            id=deployed.id,
            name=endpoint_path(objects.by_id(tx, deployed.workspace), deployed.name),
            model=models.pop() if models else deployed.model,
            routes=tuple(Route(version=route.version, weight=route.weight) for route in deployed.routes),
            lookup=deployed.lookup,
        )
        return DesiredEndpoint(deployed, endpoint, files, problems, barred)

    def _file(self, tx: Transaction, ident: str, number: str, served: DeployedEndpoint) -> ServedFile:
        """A version, if it is there, its signature holds, and it may be served still."""
        found = objects.by_id(tx, ident)
        if found is None:
            raise objects.unknown(ident, "model_version")
        version = self.versions(tx, found)
        self.servable(tx, found, served)
        name = endpoint_path(objects.by_id(tx, found.workspace), version.name)
        return ServedFile(model=name, version=number, registered=found.id, features=feature_names(version))


def _sources(
    serving: dict[str, tuple[Endpoint, dict[str, ServedFile]]],
) -> dict[VersionKey, PredictionSource]:
    """What the predictions of every version that is served come from."""
    found: dict[VersionKey, PredictionSource] = {}
    for ident, (endpoint, files) in serving.items():
        lookup = endpoint.lookup
        views = () if lookup is None else tuple(view.view for view in lookup.views)
        for version, file in files.items():
            features = lookup.features if lookup is not None and lookup.features else file.features
            found[ident, version] = PredictionSource(str(file.registered), views, features)
    return found
