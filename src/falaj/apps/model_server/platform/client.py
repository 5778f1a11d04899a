"""The model server's client of the platform: loads, reads, stores and reports as its service account."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from falaj.apps.model_server.inference.shadow import ShadowRunner
from falaj.apps.model_server.metrics import ServerMetrics, VersionMetrics
from falaj.apps.model_server.platform.ensembles import open_ensemble
from falaj.apps.model_server.platform.recorder import PredictionRecorder, PredictionSource, VersionKey
from falaj.apps.model_server.platform.remote_engine import RemoteEngines
from falaj.assembly.model_server import gpu_devices, read_online
from falaj.assembly.parsing import find_sandboxes, hidden_paths
from falaj.assembly.platform import LocalPlatform
from falaj.errors import Damaged, NotFound
from falaj.governance.operations.caller import Caller, acting_as
from falaj.monitoring.windows.collector import Collector
from falaj.monitoring.windows.delivery import Delivery
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ByteSource
from falaj.ports.queries import ArrowTable
from falaj.records.features import OnlineRows
from falaj.records.governance.objects import StoredObject
from falaj.records.monitoring.monitors import WindowRecord
from falaj.records.registry import FileFormat, ModelFile, ModelVersion
from falaj.records.serving.endpoints import DeployedEndpoint, LoadProblem, ServedFile
from falaj.records.serving.settings import MeasuredVersion
from falaj.records.serving.shadows import ShadowCounts
from falaj.records.serving.statistics import VersionCounts
from falaj.serving.runtime.engine import ModelEngine
from falaj.serving.runtime.engines.opened import ModelContents
from falaj.serving.runtime.formats import READS_OTHERS
from falaj.serving.runtime.loading import open_model
from falaj.serving.runtime.worker import WorkerStarter
from falaj.serving.validation import ensemble_parts, require_still_servable


class PlatformClient:
    """Calls the platform through its operations, and so through the gate."""

    def __init__(self, platform: LocalPlatform, account: Caller) -> None:
        self._platform = platform
        self._services = platform.services
        self._account = account
        self._starter = WorkerStarter(
            find_sandboxes, hidden=hidden_paths(platform.home, platform.config), devices=gpu_devices()
        )
        self.remote = RemoteEngines(platform.config, platform.gate.zones)
        self.collector = Collector()
        self._windows = Delivery(self.collector, self._record_windows)

    def load(self, file: ServedFile) -> ModelEngine:
        """Load a registered version, verify its signature and bytes, and open it from memory, or have it by Triton.

        An ensemble is opened step by step, each as a version of its own.
        """
        if file.format is FileFormat.ENSEMBLE:
            return open_ensemble(file, self._contents(file).model, load=self.load, features=self)
        if file.settings.engine == "triton":
            return self.remote.load(file)
        serving = self._platform.config.serving
        return open_model(
            file,
            self._contents(file),
            isolation=serving.isolation,
            memory_bytes=serving.model_memory,
            starter=self._starter,
        )

    def _contents(self, file: ServedFile) -> ModelContents:
        """Return the verified bytes of a registered version."""
        with acting_as(self._account):
            version = self._services.models.version(str(file.registered))
            models = [each for each in version.files if each.format is version.format]
            if len(models) != 1:
                raise NotFound(
                    f"{version.reference} has {len(models)} model files; exactly one is needed to serve it"
                )
            others = [each for each in version.files if each is not models[0]]
            return ModelContents(
                self._read(version, models[0]),
                {each.path: self._read(version, each) for each in others if version.format in READS_OTHERS},
            )

    def require_servable(
        self, tx: Transaction, version: StoredObject, opened: ModelVersion, served: DeployedEndpoint
    ) -> None:
        """Raise if a deployed version, or a part of it, lost its key, or may no longer lie where it would run."""
        parts = ensemble_parts(tx, opened)
        require_still_servable(self._platform.gate, tx, version, served, parts=parts)
        self.remote.require_permitted(version, served)

    def _read(self, version: ModelVersion, file: ModelFile) -> bytes:
        content = b"".join(self._services.models.read(version.id, file.path))
        if len(content) != file.size_bytes:
            raise Damaged(f"{version.reference}: the file {file.path} is truncated")
        return content

    def read(self, view: str, keys: Sequence[str]) -> OnlineRows:
        """Read the newest features of each key."""
        self._platform.gate.hot.admit(self._account, "features.read", view)
        return read_online(self._services, view, keys)

    def read_arrow(self, content: bytes, owner: str) -> ArrowTable:
        """Read an Arrow stream of a caller in a process without keys."""
        from falaj.governance import arrow_ipc

        limit_bytes = self._platform.config.serving.max_body
        source = ByteSource(len(content), lambda start, size: content[start : start + size])
        options = {"where": "body", "limit_bytes": limit_bytes}
        parsed = self._platform.parsers.parse("arrow", [source], options, owner=owner)
        return arrow_ipc.read_result(parsed.content, where="body", limit_bytes=limit_bytes)

    def store_batch(
        self, key: VersionKey, batch: str, content: bytes, rows: int, source: PredictionSource
    ) -> None:
        """Store a batch of predictions."""
        with acting_as(self._account):
            self._services.endpoints.record(
                iter([content]),
                endpoint=key[0],
                batch=batch,
                rows=rows,
                version=source.version,
                views=source.views,
            )

    def report_versions(
        self,
        endpoint: str,
        *,
        problems: tuple[LoadProblem, ...] = (),
        measured: tuple[MeasuredVersion, ...] = (),
    ) -> None:
        with acting_as(self._account):
            self._services.endpoints.report(endpoint, problems=problems, measured=measured)

    def report(
        self, endpoint: str, counts: tuple[VersionCounts, ...], shadows: tuple[ShadowCounts, ...] = ()
    ) -> None:
        with acting_as(self._account):
            self._services.endpoints.report(endpoint, counts=counts, shadows=shadows)

    def deliver_windows(self) -> None:
        """Deliver the sketches since the last call to monitoring; windows that fail are retried on the next call."""
        self._windows.deliver()

    def _record_windows(self, endpoint: str, windows: tuple[WindowRecord, ...]) -> None:
        with acting_as(self._account):
            self._services.monitoring.record(endpoint, windows=windows)


class CountReporter:
    """Reports the counts since the last report; failed reports are included in the next."""

    def __init__(
        self,
        client: PlatformClient,
        metrics: ServerMetrics,
        log: PredictionRecorder,
        names: Callable[[], Mapping[str, str]],
        shadows: ShadowRunner,
    ) -> None:
        """`names` returns the ids of endpoints by their names in paths."""
        self._shadows = shadows
        self._client = client
        self._metrics = metrics
        self._log = log
        self._names = names
        self._reported: dict[VersionKey, VersionCounts] = {}
        self._lost: dict[VersionKey, int] = {}

    def report(self) -> None:
        """Report the new counts, in one operation per endpoint."""
        totals = self._totals()
        for name, ident in self._names().items():
            own = {version: total for (of, version), total in totals.items() if of == name}
            new = [self._since(name, ident, total) for total in own.values()]
            changed = tuple(each for each in new if each.requests or each.lost)
            self._report_shadows(ident)
            if changed:
                self._client.report(ident, changed)
                for each in changed:
                    self._reported[name, each.version] = own[each.version]
                    self._lost[ident, each.version] = self._lost.get((ident, each.version), 0) + each.lost

    def _report_shadows(self, ident: str) -> None:
        found = self._shadows.take_counts(ident)
        if found:
            try:
                self._client.report(ident, (), tuple(found))
            except Exception:
                self._shadows.give_back(ident, found)
                raise

    def _totals(self) -> dict[VersionKey, VersionCounts]:
        """Return all counts by endpoint name and version."""
        metrics = self._metrics.snapshot().items()
        return {(name, version): _total(version, metrics) for (name, version), metrics in metrics if version}

    def _since(self, name: str, ident: str, total: VersionCounts) -> VersionCounts:
        key = (ident, total.version)
        before = self._reported.get((name, total.version)) or VersionCounts(
            version=total.version, latency=(0,) * len(total.latency)
        )
        return VersionCounts(
            version=total.version,
            requests=total.requests - before.requests,
            errors=total.errors - before.errors,
            rows=total.rows - before.rows,
            latency=tuple(now - then for now, then in zip(total.latency, before.latency, strict=True)),
            lost=self._log.lost[key] - self._lost.get(key, 0),
        )


def _total(version: str, metrics: VersionMetrics) -> VersionCounts:
    statuses = dict(metrics.statuses)
    return VersionCounts(
        version=version,
        requests=sum(statuses.values()),
        errors=sum(number for status, number in statuses.items() if status != 200),
        rows=metrics.rows,
        latency=tuple(metrics.buckets),
    )
