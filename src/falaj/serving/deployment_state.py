"""The endpoints and versions that are served, replaced atomically without failing requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from falaj.errors import InvalidInput, NotFound
from falaj.records.serving.endpoints import Deployment, Endpoint, ServedFile
from falaj.records.serving.settings import ServingSettings
from falaj.records.serving.tensors import DYNAMIC
from falaj.serving.lookups.joins import FeatureJoin, LookupMeter, build_join
from falaj.serving.routing import WeightedRouter
from falaj.serving.runtime.batch_queue import BatchQueue
from falaj.serving.runtime.engine import ModelEngine
from falaj.serving.runtime.loading import load as load_file


@dataclass(frozen=True, slots=True)
class ServedEndpoint:
    """An endpoint with the batch queues of its versions."""

    endpoint: Endpoint
    queues: Mapping[str, BatchQueue]
    router: WeightedRouter
    joins: Mapping[str, FeatureJoin]
    """How the input of each version is assembled, if the endpoint looks up features."""
    answering: tuple[str, ...]
    """The versions that answer requests: all but shadows."""
    fallback: str | None
    """The version that answers where another one fails."""
    lookups: LookupMeter
    features: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What the columns of each version's input are called; empty where nobody said."""

    def representative(self, version: str | None) -> BatchQueue:
        """Return the queue whose model describes the endpoint: of `version`, or of the heaviest route."""
        heaviest = max(self.endpoint.routes, key=lambda route: route.weight).version
        return self.queues[version or heaviest]


@dataclass(slots=True)
class DeploymentState:
    """Holds an immutable snapshot of the served endpoints, and replaces it once the next one is loaded.

    A request that started on the old snapshot finishes there: its queue lives as long as requests wait in it.
    """

    make_queue: Callable[[ModelEngine, ServingSettings], BatchQueue]
    load: Callable[[ServedFile], ModelEngine] = load_file
    served: Mapping[str, ServedEndpoint] = field(default_factory=lambda: MappingProxyType({}))
    _queues: dict[ServedFile, BatchQueue] = field(default_factory=dict)
    _prepared: dict[ServedFile, BatchQueue] = field(default_factory=dict)
    _apply_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def prepare(self, file: ServedFile, endpoint: Endpoint) -> None:
        """Load a model before the deployment that serves it for `endpoint`. Raise if it cannot be served."""
        queue = self._queues.get(file) or self._prepared.get(file)
        if queue is None:
            queue = self._prepared[file] = await self._load(file)
        _join(endpoint, file, queue)

    async def apply(self, deployment: Deployment) -> None:
        """Serve `deployment`. If one of its models fails to load, nothing changes."""
        async with self._apply_lock:
            known = self._queues | self._prepared
            queues = {file: known.get(file) or await self._load(file) for file in deployment.models}
            files = {(file.model, file.version, file.settings): file for file in deployment.models}
            served = {e.name: self._joined(e, files, queues) for e in deployment.endpoints}
            self._queues, self.served = queues, MappingProxyType(served)
            self._prepared = {}

    def close(self) -> None:
        """End the processes of models."""
        for queue in (self._queues | self._prepared).values():
            queue.close()

    def queue_of(self, file: ServedFile) -> BatchQueue | None:
        """Return the queue of a loaded version."""
        return self._queues.get(file)

    def find(self, endpoint: str) -> ServedEndpoint:
        found = self.served.get(endpoint)
        if found is None:
            raise NotFound(
                f"there is no endpoint '{endpoint}' that you may call",
                details={"kind": "endpoint", "reference": endpoint},
            )
        return found

    async def _load(self, file: ServedFile) -> BatchQueue:
        return self.make_queue(await asyncio.to_thread(self.load, file), file.settings)

    def _joined(
        self,
        endpoint: Endpoint,
        files: Mapping[tuple[str, str, ServingSettings], ServedFile],
        queues: Mapping[ServedFile, BatchQueue],
    ) -> ServedEndpoint:
        settings = endpoint.settings.of_runs
        own = {route.version: files[endpoint.model, route.version, settings] for route in endpoint.routes}
        by_version = {version: queues[file] for version, file in own.items()}
        joins = {version: _join(endpoint, file, queues[file]) for version, file in own.items()}
        before = self.served.get(endpoint.name)
        counter = None if before is None else before.router.counter
        return ServedEndpoint(
            endpoint,
            by_version,
            WeightedRouter(endpoint.routes, name=endpoint.name, counter=counter),
            joins={version: join for version, join in joins.items() if join is not None},
            features={version: file.features for version, file in own.items() if file.features},
            answering=tuple(route.version for route in endpoint.routes if not route.shadow),
            fallback=next((route.version for route in endpoint.routes if route.fallback), None),
            lookups=LookupMeter() if before is None else before.lookups,
        )


def _join(endpoint: Endpoint, file: ServedFile, queue: BatchQueue) -> FeatureJoin | None:
    """Return the feature join of a version. Raise InvalidInput if its input does not match the lookup."""
    if endpoint.lookup is None:
        return None
    join = build_join(endpoint.lookup, file.features, version=file.version)
    inputs = queue.model.inputs
    if len(inputs) != 1 or len(inputs[0].shape) != 2 or inputs[0].shape[1] not in (DYNAMIC, join.width):
        raise InvalidInput.at(
            f"{endpoint.name} lookup",
            given=f"{join.width} columns",
            allowed=f"the one input of {file.model}@{file.version}: {', '.join(map(str, inputs))}",
        )
    return join
