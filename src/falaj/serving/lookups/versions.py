"""What the training set of a version says of its features: how they are computed, and what replaces missing ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from falaj.errors import Fault, InvalidInput
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.records.expressions.declarations import resolve_features
from falaj.records.expressions.syntax import names_of, parse
from falaj.records.features import ColumnType, RequestFeature, TrainingSet
from falaj.records.governance.objects import StoredObject
from falaj.records.registry import ModelVersion
from falaj.records.serving.lookups import Lookup, VersionLookup
from falaj.records.serving.tensors import Datatype
from falaj.serving.dependencies import TrainingFacts
from falaj.serving.lookups.joins import build_join, feature_names, find_feature, imputed_columns

Column = tuple[str, str]
"""The number of a version, and a column of its input."""


@dataclass(frozen=True, slots=True)
class ImputedValue:
    """A typical value of a column, and the training set or view that it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class ValueSource:
    """Where a typical value of a column may be read: a training set or a view, and the column's name there."""

    found: StoredObject
    column: str


class VersionLookups:
    """Resolves a lookup for each version that an endpoint serves."""

    def __init__(self, gate: Gate, training: TrainingFacts) -> None:
        self._gate = gate
        self._training = training

    def plan(
        self, call: Call, tx: Transaction, lookup: Lookup, versions: Sequence[ModelVersion]
    ) -> dict[Column, list[ValueSource]]:
        """Return where the values are to be read that features without a value get, the best place first."""
        found: dict[Column, list[ValueSource]] = {}
        for version in versions:
            dataset, training_set = self._training_set(tx, version)
            own = VersionLookup(
                version=str(version.number),
                request_features=self._request_features(call, tx, lookup, version),
            )
            named = lookup.model_copy(update={"versions": (own,)})
            join = build_join(named, feature_names(version), version=own.version)
            for column in imputed_columns(lookup, join):
                if column not in lookup.imputed:
                    places = value_sources(tx, lookup, column, dataset, training_set)
                    for place in places:
                        action = "features.load" if place.found.kind == "dataset" else "features.read"
                        self._gate.require(call, action, place.found, tx=tx)
                    found[own.version, column] = places
        return found

    def read(self, plan: Mapping[Column, Sequence[ValueSource]]) -> dict[Column, ImputedValue]:
        """Return the typical values of a plan. It reads whole tables: no transaction is open."""
        known: dict[tuple[str, str], float | None] = {}
        found: dict[Column, ImputedValue] = {}
        for rank in range(2):
            wanted: dict[str, tuple[StoredObject, set[str]]] = {}
            for column, places in plan.items():
                if column not in found and rank < len(places):
                    place = places[rank]
                    wanted.setdefault(place.found.id, (place.found, set()))[1].add(place.column)
            for ident, (source, columns) in wanted.items():
                values = self._training.typical_values(source, sorted(columns))
                known |= {(ident, column): values.get(column) for column in columns}
            for column, places in plan.items():
                place_value = (
                    known.get((places[rank].found.id, places[rank].column)) if rank < len(places) else None
                )
                if column not in found and place_value is not None:
                    kind = "training set" if places[rank].found.kind == "dataset" else "view"
                    found[column] = ImputedValue(place_value, f"{kind} {places[rank].found.name}")
        return found

    def resolve(
        self,
        call: Call,
        lookup: Lookup,
        versions: Sequence[ModelVersion],
        values: Mapping[Column, ImputedValue],
    ) -> Lookup:
        """Return `lookup` with what is particular to each version."""
        own = []
        for version in versions:
            number = str(version.number)
            imputed = {column: value for (of, column), value in values.items() if of == number}
            own.append(
                VersionLookup(
                    version=number,
                    request_features=self._request_features(call, call.tx, lookup, version),
                    imputed={column: value.value for column, value in imputed.items()},
                    source=", ".join(dict.fromkeys(value.source for value in imputed.values())),
                )
            )
        return lookup.model_copy(update={"versions": tuple(own)})

    def _training_set(
        self, tx: Transaction, version: ModelVersion
    ) -> tuple[StoredObject | None, TrainingSet | None]:
        found = None if version.training_set is None else objects.by_id(tx, version.training_set)
        if found is None or found.kind != "dataset":
            return None, None
        return found, self._training.training_set(tx, found)

    def _request_features(
        self, call: Call, tx: Transaction, lookup: Lookup, version: ModelVersion
    ) -> tuple[RequestFeature, ...]:
        """Return the request-time features that a version needs. Raise InvalidInput with all faults."""
        dataset, made = self._training_set(tx, version)
        trained = () if made is None else made.request_features
        if dataset is not None and trained:
            self._gate.require(call, "features.load", dataset, tx=tx)
        where = f"lookup for {version.reference}"
        _require_same(lookup, trained, where, dataset)
        names = {each.name for each in trained}
        together = [*trained, *(each for each in lookup.request_features if each.name not in names)]
        return resolve_needed(together, lookup, lookup.features or feature_names(version), where=where)


def value_sources(
    tx: Transaction,
    lookup: Lookup,
    column: str,
    dataset: StoredObject | None = None,
    training_set: TrainingSet | None = None,
) -> list[ValueSource]:
    """Return where a typical value of a column may be read: in the training set, if there is one, or in the view."""
    feature = find_feature(lookup, column)
    view = None if feature is None else objects.by_id(tx, lookup.views[feature[0]].view)
    places = []
    if dataset is not None and training_set is not None:
        joined = "" if view is None or feature is None else f"{view.name}__{feature[1]}"
        named = next((name for name in (column, joined) if name in training_set.columns), None)
        places += [] if named is None else [ValueSource(dataset, named)]
    if view is not None and feature is not None:
        places.append(ValueSource(view, feature[1]))
    return places


def resolve_needed(
    features: Sequence[RequestFeature], lookup: Lookup, columns: Sequence[str], *, where: str
) -> tuple[RequestFeature, ...]:
    """Return the request-time features that `columns` need, with their types. Raise InvalidInput with all faults."""
    needed = _needed(features, columns)
    resolved = resolve_features(needed, _known_types(lookup), where=where, open_names=True)
    _require_numbers(resolved, columns, where)
    return resolved


def has_imputation(lookup: Lookup) -> bool:
    """Tell whether a lookup replaces features that have no value by typical ones."""
    return "impute" in (lookup.missing, *(view.missing for view in lookup.views))


def known_values(lookup: Lookup | None) -> dict[Column, ImputedValue]:
    """Return the imputed values that a lookup already has."""
    return {
        (each.version, column): ImputedValue(value, each.source)
        for each in (() if lookup is None else lookup.versions)
        for column, value in each.imputed.items()
    }


def _known_types(lookup: Lookup) -> dict[str, ColumnType]:
    """Return the types of what expressions can use: features of views by their long name, and keys."""
    keys = {
        key: ColumnType.INTEGER if kind is Datatype.INT64 else ColumnType.TEXT
        for view in lookup.views
        for key, kind in zip(view.keys, view.key_types, strict=False)
    }
    features = {
        f"{view.name}__{feature}": kind
        for view in lookup.views
        for feature, kind in zip(view.features, view.types, strict=False)
    }
    return keys | features


def _needed(features: Sequence[RequestFeature], columns: Sequence[str]) -> list[RequestFeature]:
    """Return the features that are columns of the model, and those that they are computed from, in their order."""
    wanted, found = set(columns), []
    for each in reversed(features):
        if each.name in wanted:
            wanted |= set(names_of(parse(each.expression)))
            found.append(each)
    return found[::-1]


def _require_same(
    lookup: Lookup, trained: Sequence[RequestFeature], where: str, dataset: StoredObject | None
) -> None:
    """Raise InvalidInput if a lookup computes a feature in another way than the training set did."""
    known = {each.name: each.expression for each in trained}
    faults = [
        Fault(
            where=f"{where}: request_features.{each.name}",
            given=each.expression,
            allowed=f"{known[each.name]}, as in the training set {dataset.name if dataset else ''}",
            fix="leave it out: the endpoint computes it as the training set did",
        )
        for each in lookup.request_features
        if known.get(each.name, each.expression) != each.expression
    ]
    if faults:
        raise InvalidInput(f"{where} does not fit the training set", faults=faults)


def _require_numbers(features: Sequence[RequestFeature], columns: Sequence[str], where: str) -> None:
    """Raise InvalidInput if a column of the model is a text or a moment in an expression."""
    faults = [
        Fault(
            where=f"{where}: {name}",
            given=f"{kind} in {each.name} = {each.expression}",
            allowed="a number, since it is a column of the model",
        )
        for each in features
        for name, kind in each.inputs.items()
        if name in columns and kind in (ColumnType.TEXT, ColumnType.MOMENT)
    ]
    if faults:
        raise InvalidInput(f"{where} does not fit the model", faults=faults)
