"""Checks before a version is served: permissions, format, residency and feature lookup."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from falaj.errors import Fault, InvalidInput, KeyUnavailable, NotFound, ResidencyDenied
from falaj.governance import objects
from falaj.governance.encryption.keyring import has_living_key
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.records.features import ColumnType
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import Zone
from falaj.records.registry import FileFormat, ModelVersion
from falaj.records.serving.endpoints import DeployedEndpoint, Route, ServedRoute
from falaj.records.serving.lookups import Lookup, ViewLookup
from falaj.records.serving.tensors import Datatype
from falaj.serving.dependencies import LoadVersion, LoadView
from falaj.serving.lookups.joins import require_lookup_fits_version
from falaj.serving.runtime.formats import format_fault

NUMERIC = frozenset({ColumnType.INTEGER, ColumnType.FLOAT, ColumnType.BOOLEAN})
RESERVED = frozenset({"config", "index", "infer", "load", "ready", "stats", "unload", "versions"})
"""Words of the protocol's paths, which no endpoint may be named."""


def require_name(name: str) -> None:
    if name in RESERVED:
        raise InvalidInput.at(
            "name", given=name, allowed="a name that is not reserved by the inference protocol"
        )


def require_servable(
    gate: Gate, call: Call, found: Sequence[StoredObject], zone: Zone, *, opened: LoadVersion
) -> list[ModelVersion]:
    """Return the versions `found`. Raise unless each may be served in `zone`."""
    for each in found:
        gate.require(call, "models.read", each)
    seen = partial(gate.authorizer.sees, call.tx, call.caller)
    gate.zones.require(call.tx, found, zone, seen=seen)
    versions = [opened(call.tx, each) for each in found]
    faults = [fault for version in versions if (fault := format_fault(version)) is not None]
    for version in versions:
        for part in ensemble_parts(call.tx, version):
            gate.require(call, "models.read" if part.kind == "model_version" else "features.read", part)
            gate.zones.require(call.tx, [part], zone, seen=seen)
    if faults:
        raise InvalidInput("the model server has no engine for this format", faults=faults)
    return versions


def ensemble_parts(tx: Transaction, version: ModelVersion) -> list[StoredObject]:
    """Return the versions and views that an ensemble consists of; none of any other version. Raise NotFound if one
    was deleted."""
    if version.format is not FileFormat.ENSEMBLE:
        return []
    found = [objects.by_id(tx, ident) for ident in version.sources]
    if None in found:
        raise NotFound(f"a step of {version.reference} was deleted: {version.sources[found.index(None)]}")
    return [part for part in found if part is not None]


def require_still_servable(
    gate: Gate,
    tx: Transaction,
    version: StoredObject,
    served: DeployedEndpoint,
    *,
    parts: Sequence[StoredObject] = (),
) -> None:
    """Raise if a deployed version, one of its `parts`, or a view that it looks up, lost its key, or may no longer lie
    in the endpoint's zone or on this machine."""
    zone, here = gate.zones.named(served.zone or None), gate.zones.here
    looked_up = () if served.lookup is None else served.lookup.views
    views = [objects.by_id(tx, view.view) for view in looked_up]
    for each in [version, *parts, *(view for view in views if view is not None)]:
        if not each.label.permits(zone.jurisdiction):
            raise ResidencyDenied(
                f"{each.name} may no longer lie in zone {zone.name} ({zone.jurisdiction}): its label has changed"
            )
        if not each.label.permits(here.jurisdiction):
            raise ResidencyDenied(
                f"{each.name} is labelled {each.label.describe()}, and this machine is in zone {here.name}; set "
                "node.zone in falaj.toml, or serve it elsewhere"
            )
        if not has_living_key(tx, each.workspace):
            raise KeyUnavailable(f"the key of {each.name} was destroyed")


def resolve_versions(
    tx: Transaction, routes: Sequence[Route], *, model: str, served: StoredObject
) -> list[StoredObject]:
    """Return the versions that routes name, by number or like churn@14, in the workspace of the version `served`."""
    found, faults = [], []
    for route in routes:
        name, _, number = route.version.rpartition("@")
        place = {"workspace": served.workspace, "kind": "model_version", "name": f"{name or model}@{number}"}
        version = objects.by_name(tx, **place) or objects.by_alias(tx, **place)
        if version is None or (name and name != model):
            allowed = f"a version of {model}; to serve another model, deploy it under another name"
            faults.append(Fault(where="routes.version", given=route.version, allowed=allowed))
        else:
            found.append(version)
    if faults:
        raise InvalidInput("a route names an unknown version", faults=faults)
    _require_once([version.name.rpartition("@")[2] for version in found])
    return found


def _require_once(numbers: Sequence[str]) -> None:
    duplicates = sorted({number for number in numbers if numbers.count(number) > 1})
    if duplicates:
        raise InvalidInput.at("routes", given=f"{', '.join(duplicates)} twice", allowed="each version once")


def served_routes(routes: Sequence[Route], versions: Sequence[StoredObject]) -> tuple[ServedRoute, ...]:
    pairs = zip(routes, versions, strict=True)
    return tuple(
        ServedRoute(
            version=found.name.rpartition("@")[2],
            weight=route.weight,
            shadow=route.shadow,
            fallback=route.fallback,
            id=found.id,
        )
        for route, found in pairs
    )


def require_routes(routes: Sequence[Route]) -> None:
    _require_once([route.version.rpartition("@")[2] for route in routes])
    if not any(route.weight for route in routes):
        raise InvalidInput.at("routes", given="no weight above 0", allowed="at least one above 0")
    fallbacks = [route.version for route in routes if route.fallback]
    if len(fallbacks) > 1:
        raise InvalidInput.at("routes", given=f"the fallbacks {', '.join(fallbacks)}", allowed="one fallback")


def resolve_lookup(
    gate: Gate, call: Call, tx: Transaction, lookup: Lookup, *, workspace: str, opened: LoadView
) -> tuple[Lookup, list[StoredObject]]:
    """Return `lookup` with the ids, keys and features of its views, and the views."""
    found = [objects.resolve(tx, each.view, kind="view", workspace=workspace) for each in lookup.views]
    faults: list[Fault] = []
    views = []
    for given, view in zip(lookup.views, found, strict=True):
        gate.require(call, "features.read", view, tx=tx, reference=given.view)
        views.append(_resolved_view(tx, given, view, opened, faults))
    names = [view.name for view in views]
    faults += [
        Fault(where=f"lookup: view {name}", given="a duplicate name", allowed="a unique name for each view")
        for name in sorted({str(name) for name in names if names.count(name) > 1})
    ]
    if faults:
        raise InvalidInput("the lookup is not valid", faults=faults)
    return lookup.model_copy(update={"views": tuple(views), "versions": ()}), found


def is_same_lookup(one: Lookup, other: Lookup | None) -> bool:
    """Tell whether two lookups are the same, whatever features their views have meanwhile."""

    def plain(lookup: Lookup) -> Lookup:
        views = tuple(view.model_copy(update={"features": (), "types": ()}) for view in lookup.views)
        return lookup.model_copy(update={"views": views, "versions": ()})

    return other is not None and plain(one) == plain(other)


def _resolved_view(
    tx: Transaction, given: ViewLookup, view: StoredObject, opened: LoadView, faults: list[Fault]
) -> ViewLookup:
    stored = opened(tx, view)
    if stored is None:
        raise objects.unknown(given.view, "view")
    columns = tuple(key.name for key in stored.keys)
    keys = given.keys or columns
    where = f"lookup: view {view.name}"
    if len(keys) != len(columns):
        faults.append(
            Fault(
                where=where, given=f"keys {', '.join(keys)}", allowed=f"one for each of {', '.join(columns)}"
            )
        )
    numeric = [each for each in stored.definition.features if each.type in NUMERIC]
    if not numeric:
        faults.append(Fault(where=where, given="no numeric feature", allowed="numeric features"))
    types = tuple(Datatype.INT64 if key.type is ColumnType.INTEGER else Datatype.BYTES for key in stored.keys)
    return ViewLookup(
        view=view.id,
        name=given.name or view.name,
        keys=keys,
        features=tuple(each.name for each in numeric),
        types=tuple(each.type for each in numeric),
        key_types=types,
        missing=given.missing,
        max_age=given.max_age,
    )


def require_lookup_fits(lookup: Lookup | None, versions: Sequence[ModelVersion]) -> None:
    for version in versions if lookup is not None else ():
        if lookup is not None:
            require_lookup_fits_version(lookup, version)
