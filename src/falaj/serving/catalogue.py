"""What is served now: endpoints, their versions, and how both change without a failed request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from falaj.errors import InvalidInput, NotFound
from falaj.records.serving import DYNAMIC, Deployment, Endpoint, ServedFile
from falaj.serving.lookups import Join, joined
from falaj.serving.routing import Spread
from falaj.serving.runtime.engine import Engine
from falaj.serving.runtime.engine import load as load_file
from falaj.serving.runtime.lanes import Lane


@dataclass(frozen=True, slots=True)
class Served:
    """An endpoint with the lanes of its versions."""

    endpoint: Endpoint
    lanes: Mapping[str, Lane]
    spread: Spread
    joins: Mapping[str, Join]
    """How the input of each version is put together, if the endpoint looks features up."""

    def lane(self, version: str | None, request: str) -> Lane:
        """The lane for a request: of the version that it names, or of the one that its turn falls to."""
        return self.lanes[self.spread.choose(request) if version is None else version]

    def shown(self, version: str | None) -> Lane:
        """The lane whose model describes the endpoint: of `version`, or of the heaviest route."""
        heaviest = max(self.endpoint.routes, key=lambda route: route.weight).version
        return self.lanes[version or heaviest]


@dataclass(slots=True)
class Catalogue:
    """Holds one immutable picture of what is served, and swaps it for another once that is loaded.

    A request that began on the old picture ends there: its lane lives as long as something waits in it.
    """

    make_lane: Callable[[Engine], Lane]
    load: Callable[[ServedFile], Engine] = load_file
    served: Mapping[str, Served] = field(default_factory=lambda: MappingProxyType({}))
    _lanes: dict[ServedFile, Lane] = field(default_factory=dict)
    _prepared: dict[ServedFile, Lane] = field(default_factory=dict)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def prepare(self, file: ServedFile, endpoint: Endpoint) -> None:
        """Load a model ahead of the deployment that serves it for `endpoint`; the error says why it cannot be."""
        lane = self._lanes.get(file) or self._prepared.get(file)
        if lane is None:
            lane = self._prepared[file] = await self._load(file)
        _join(endpoint, file, lane)

    async def apply(self, deployment: Deployment) -> None:
        """Serve `deployment` from now on. If a model of it does not load, nothing changes."""
        async with self._one_at_a_time:
            known = self._lanes | self._prepared
            lanes = {file: known.get(file) or await self._load(file) for file in deployment.models}
            files = {(file.model, file.version): file for file in deployment.models}
            served = {e.name: self._joined(e, files, lanes) for e in deployment.endpoints}
            self._lanes, self.served = lanes, MappingProxyType(served)
            self._prepared = {}

    def find(self, endpoint: str) -> Served:
        found = self.served.get(endpoint)
        if found is None:
            raise NotFound(f"there is no endpoint '{endpoint}' that you may call")
        return found

    async def _load(self, file: ServedFile) -> Lane:
        return self.make_lane(await asyncio.to_thread(self.load, file))

    def _joined(
        self,
        endpoint: Endpoint,
        files: Mapping[tuple[str, str], ServedFile],
        lanes: Mapping[ServedFile, Lane],
    ) -> Served:
        own = {route.version: files[endpoint.model, route.version] for route in endpoint.routes}
        by_version = {version: lanes[file] for version, file in own.items()}
        joins = {version: _join(endpoint, file, lanes[file]) for version, file in own.items()}
        before = self.served.get(endpoint.name)
        turns = None if before is None else before.spread.turns
        found = {version: join for version, join in joins.items() if join is not None}
        return Served(endpoint, by_version, Spread(endpoint.routes, turns=turns), found)


def _join(endpoint: Endpoint, file: ServedFile, lane: Lane) -> Join | None:
    """How the one input of a version is put together; InvalidInput if its columns are not those of the lookup."""
    if endpoint.lookup is None:
        return None
    join = joined(endpoint.lookup, file.features)
    inputs = lane.model.inputs
    if len(inputs) != 1 or len(inputs[0].shape) != 2 or inputs[0].shape[1] not in (DYNAMIC, join.width):
        raise InvalidInput.at(
            f"{endpoint.name} lookup",
            given=f"{join.width} columns",
            allowed=f"the one input of {file.model}@{file.version}: {', '.join(map(str, inputs))}",
        )
    return join
