"""Reload deployments and the policy epoch as they change in the database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from falaj.apps.model_server.platform.admission import GateAdmission
from falaj.apps.model_server.platform.load_retries import LoadRetries
from falaj.apps.model_server.platform.recorder import PredictionRecorder, PredictionSource, VersionKey
from falaj.apps.model_server.server import ModelServer
from falaj.errors import FalajError, KeyUnavailable, ResidencyDenied
from falaj.governance import objects
from falaj.governance.policy.epochs import current_epoch
from falaj.ports.metadata import Database, Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.registry import FileFormat, ModelVersion
from falaj.records.serving.endpoints import (
    SHADOW,
    DeployedEndpoint,
    Deployment,
    Endpoint,
    LoadProblem,
    Route,
    ServedFile,
    ServedRoute,
)
from falaj.records.serving.settings import MeasuredVersion
from falaj.serving import store
from falaj.serving.dependencies import LoadVersion
from falaj.serving.lookups.joins import feature_names
from falaj.serving.runtime.formats import declared_tensors
from falaj.serving.service import endpoint_path

T = TypeVar("T")

POLL_S = 0.2

RequireServable = Callable[[Transaction, StoredObject, ModelVersion, DeployedEndpoint], None]
"""Raises if a version, or a part of it, may no longer be served for an endpoint."""


class ReportVersions(Protocol):
    """Reports which versions of an endpoint cannot be served, which recovered, and how those that are served run."""

    def __call__(
        self,
        endpoint: str,
        *,
        problems: tuple[LoadProblem, ...] = (),
        measured: tuple[MeasuredVersion, ...] = (),
    ) -> None: ...


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DesiredEndpoint:
    """The desired state of an endpoint: the files of its versions, and the problems of those without a file.

    `barred` versions must not be served even if they are loaded, because of residency or a destroyed key.
    """

    deployed: DeployedEndpoint
    endpoint: Endpoint
    files: dict[str, ServedFile]
    problems: dict[str, str]
    barred: set[str]
    errors: dict[str, FalajError] = field(default_factory=dict)
    """Why a version without a file has none."""


@dataclass
class DeploymentReloader:
    """Reconciles the server with the database, version by version; a failed version does not affect the others."""

    database: Database
    server: ModelServer
    admission: GateAdmission
    recorder: PredictionRecorder
    versions: LoadVersion
    report_versions: ReportVersions
    servable: RequireServable
    clock: Callable[[], float] = time.monotonic
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when what is deployed was loaded for the first time, as far as it can be."""
    _retries: LoadRetries = field(default_factory=LoadRetries)
    _known: tuple[int, int] = (-1, -1)
    _serving: dict[str, tuple[Endpoint, dict[str, ServedFile]]] = field(default_factory=dict)
    _reported: dict[VersionKey, str | None] = field(default_factory=dict)
    _measured: dict[VersionKey, MeasuredVersion] = field(default_factory=dict)

    async def run(self) -> None:
        """Poll for changes until cancelled; failed reads are retried.

        The epoch also moves when a label changes or a key is destroyed.
        """
        while True:
            try:
                known = await asyncio.to_thread(
                    self._read, lambda tx: (store.revision(tx), current_epoch(tx))
                )
                if known != self._known or self.clock() >= self._retries.next_at:
                    await self.sync()
                    self._known = known
                    self.loaded.set()
            except Exception:
                _log.exception("reading the deployment failed; retrying")
            await asyncio.sleep(POLL_S)

    async def watch_epoch(self) -> None:
        """Refresh the policy epoch until cancelled, also while models are being loaded."""
        while True:
            try:
                self.admission.observe(await asyncio.to_thread(self._read, current_epoch))
            except Exception:
                _log.exception("reading the policy epoch failed; retrying")
            await asyncio.sleep(POLL_S)

    async def sync(self) -> None:
        """Serve the current deployment. If no version of an endpoint can be served, the previous ones stay."""
        desired = await asyncio.to_thread(self._desired)
        serving: dict[str, tuple[Endpoint, dict[str, ServedFile]]] = {}
        for each in desired:
            found = await self._loaded(each) or self._previous(each)
            if found is not None:
                serving[each.deployed.id] = found
        files = {file: None for _, own in serving.values() for file in own.values()}
        endpoints = tuple(endpoint for endpoint, _ in serving.values())
        self.recorder.sources = {**self.recorder.sources, **_sources(serving)}
        self.admission.endpoints = {endpoint.name: str(endpoint.id) for endpoint in endpoints}
        await self.server.apply(Deployment(models=tuple(files), endpoints=endpoints))
        self._serving = serving
        self._retries.keep({(each.deployed.id, version) for each in desired for version in each.problems})
        await asyncio.to_thread(self._report_changes, desired)
        await asyncio.to_thread(self._report_measured, serving)

    def _previous(self, desired: DesiredEndpoint) -> tuple[Endpoint, dict[str, ServedFile]] | None:
        """Return the versions that are served now, unless one of them is barred."""
        found = self._serving.get(desired.deployed.id)
        return None if found is None or desired.barred & found[1].keys() else found

    async def _loaded(self, desired: DesiredEndpoint) -> tuple[Endpoint, dict[str, ServedFile]] | None:
        """Return the endpoint with its loadable versions; None if none of them has a weight."""
        files = {}
        for version, error in desired.errors.items():
            self._failed(desired, version, error)
        for version, file in desired.files.items():
            known = self._retries.problem(*self._wanted(desired, version), self.clock())
            if known is not None:
                desired.problems[version] = known
                continue
            try:
                await self.server.prepare(file, desired.endpoint)
                files[version] = file
            except FalajError as error:
                self._failed(desired, version, error)
        routes = tuple(route for route in desired.endpoint.routes if route.version in files)
        if not any(route.weight for route in routes):
            return None
        return desired.endpoint.model_copy(update={"routes": routes}), files

    def _wanted(self, desired: DesiredEndpoint, version: str) -> tuple[VersionKey, Hashable]:
        """Return the key of a version, and what has to change before a permanent failure is tried again."""
        wanted = desired.files.get(version), desired.deployed.changed_at
        return (desired.deployed.id, version), wanted

    def _failed(self, desired: DesiredEndpoint, version: str, error: FalajError) -> None:
        desired.problems[version] = str(error)
        if self._retries.failed(*self._wanted(desired, version), error, self.clock()):
            _log.error("%s@%s is not served: %s", desired.endpoint.model, version, error)

    def _report_changes(self, desired: Sequence[DesiredEndpoint]) -> None:
        """Report versions whose problems have changed."""
        for each in desired:
            now = {version: each.problems.get(version) for version in (*each.files, *each.problems)}
            before = {route.version: route.problem for route in each.deployed.routes}
            changed = {
                version: problem
                for version, problem in now.items()
                if self._reported.get((each.deployed.id, version), before.get(version)) != problem
            }
            if changed:
                problems = tuple(LoadProblem(version=v, problem=p and p[:4000]) for v, p in changed.items())
                self.report_versions(each.deployed.id, problems=problems)
                self._reported |= {
                    (each.deployed.id, version): problem for version, problem in changed.items()
                }

    def _report_measured(self, serving: dict[str, tuple[Endpoint, dict[str, ServedFile]]]) -> None:
        """Report how versions run, where that is new."""
        for ident, (_, files) in serving.items():
            measured = (self.server.measured(file) for file in files.values())
            new = tuple(m for m in measured if m is not None and self._measured.get((ident, m.version)) != m)
            if new:
                self.report_versions(ident, measured=new)
                self._measured |= {(ident, each.version): each for each in new}

    # ---------------------------------------------------------------------------------- in a thread

    def _read(self, query: Callable[[Transaction], T]) -> T:
        with self.database.read() as tx:
            return query(tx)

    def _desired(self) -> list[DesiredEndpoint]:
        with self.database.read() as tx:
            return [self._one(tx, each) for each in store.all_endpoints(tx)]

    def _one(self, tx: Transaction, deployed: DeployedEndpoint) -> DesiredEndpoint:
        files: dict[str, ServedFile] = {}
        problems: dict[str, str] = {}
        barred: set[str] = set()
        errors: dict[str, FalajError] = {}
        for route in deployed.routes:
            try:
                files[route.version] = self._file(tx, route.id, route.version, deployed)
            except FalajError as error:
                errors[route.version] = error
                problems[route.version] = str(error)
                if isinstance(error, ResidencyDenied | KeyUnavailable):
                    barred.add(route.version)
        models = {file.model for file in files.values()}
        endpoint = Endpoint(
            id=deployed.id,
            name=endpoint_path(objects.by_id(tx, deployed.workspace), deployed.name),
            model=models.pop() if models else deployed.model,
            routes=tuple(_route(route) for route in deployed.routes),
            lookup=deployed.lookup,
            settings=deployed.settings,
            sticky=deployed.sticky,
        )
        return DesiredEndpoint(deployed, endpoint, files, problems, barred, errors)

    def _file(self, tx: Transaction, ident: str, number: str, served: DeployedEndpoint) -> ServedFile:
        """Return the model file of a version. Raise unless it exists, is signed and may still be served."""
        found = objects.by_id(tx, ident)
        if found is None:
            raise objects.unknown(ident, "model_version")
        version = self.versions(tx, found)
        self.servable(tx, found, version, served)
        name = endpoint_path(objects.by_id(tx, found.workspace), version.name)
        is_named = version.format is not FileFormat.ONNX  # which has the names in its file
        return ServedFile(
            model=name,
            version=number,
            registered=found.id,
            format=version.format,
            inputs=declared_tensors(version.inputs) if is_named else (),
            outputs=declared_tensors(version.outputs) if is_named else (),
            features=feature_names(version),
            settings=served.settings.of_runs,
        )


def _route(route: ServedRoute) -> Route:
    return Route.model_validate(route.model_dump(exclude={"id", "problem"}))


def _sources(
    serving: dict[str, tuple[Endpoint, dict[str, ServedFile]]],
) -> dict[VersionKey, PredictionSource]:
    """Return the lineage sources of the predictions of every served version."""
    found: dict[VersionKey, PredictionSource] = {}
    for ident, (endpoint, files) in serving.items():
        lookup = endpoint.lookup
        views = () if lookup is None else tuple(view.view for view in lookup.views)
        for version, file in files.items():
            features = lookup.features if lookup is not None and lookup.features else file.features
            found[ident, version] = PredictionSource(str(file.registered), views, features)
            found[ident, version + SHADOW] = found[ident, version]
    return found
