"""Feature lookup: which columns of a model's input come from views, and which from the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from falaj.errors import Fault, InvalidInput
from falaj.records.registry import ModelVersion
from falaj.records.serving import Lookup


@dataclass(frozen=True, slots=True)
class ViewColumns:
    """Columns that are read from one view; `keys` are the request inputs that form its key."""

    view: str
    name: str
    keys: tuple[str, ...]
    features: tuple[str, ...]
    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FeatureJoin:
    """How a row of the model's input is assembled; `passed` maps request inputs to columns.

    A column without a value gets that of `defaults`; a request that lacks one of the `required` columns is rejected.
    """

    columns: tuple[str, ...]
    views: tuple[ViewColumns, ...]
    passed: tuple[tuple[str, int], ...]
    defaults: tuple[float, ...]
    required: frozenset[int]

    @property
    def width(self) -> int:
        return len(self.columns)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the inputs that a request must have."""
        keys = [key for part in self.views for key in part.keys]
        return tuple(dict.fromkeys([*keys, *(name for name, _ in self.passed)]))


def build_join(lookup: Lookup, features: Sequence[str]) -> FeatureJoin:
    """Build the join for a model with columns `features`, unless `lookup` names others. Its views must be resolved."""
    names = lookup.features or tuple(features)
    taken: dict[int, dict[int, str]] = {number: {} for number in range(len(lookup.views))}
    passed = []
    for column, name in enumerate(names):
        source = _source(lookup, name)
        if source is None:
            passed.append((name, column))
        else:
            number, feature = source
            taken[number][column] = feature
    parts = tuple(
        ViewColumns(
            view=view.view,
            name=view.name or view.view,
            keys=view.keys,
            features=tuple(taken[number].values()),
            columns=tuple(taken[number]),
        )
        for number, view in enumerate(lookup.views)
    )
    default = lookup.missing if isinstance(lookup.missing, float) else nan
    return FeatureJoin(
        columns=names,
        views=parts,
        passed=tuple(passed),
        defaults=tuple(lookup.defaults.get(name, default) for name in names),
        required=frozenset(
            column
            for column, name in enumerate(names)
            if lookup.missing == "reject" and name not in lookup.defaults
        ),
    )


def _source(lookup: Lookup, name: str) -> tuple[int, str] | None:
    """Return the number of the view with a feature and its name there; a bare name must be unique among views."""
    plain = []
    for number, view in enumerate(lookup.views):
        feature = name.removeprefix(f"{view.name}__")
        if feature != name and feature in view.features:
            return number, feature
        if name in view.features:
            plain.append((number, name))
    return plain[0] if len(plain) == 1 else None


def feature_names(version: ModelVersion) -> tuple[str, ...]:
    """Return the column names of a version's input, if its signature has them."""
    for spec in version.inputs:
        if spec.features:
            return spec.features
    return tuple(spec.name for spec in version.inputs) if len(version.inputs) > 1 else ()


def require_lookup_fits_version(lookup: Lookup, version: ModelVersion) -> None:
    """Raise InvalidInput with all faults if `lookup` cannot build the input of `version`."""
    features = lookup.features or feature_names(version)
    where = f"lookup for {version.reference}"
    if not features:
        raise InvalidInput.at(
            f"{where}: features",
            given="none",
            allowed="the model's columns in their order",
            fix="name them in the lookup, or register the version with TensorSpec.features",
        )
    join = build_join(lookup, features)
    faults = [
        Fault(where=f"{where}: view {part.name}", given="none of its features", allowed=", ".join(features))
        for part in join.views
        if not part.columns
    ]
    looked_up = [join.columns[column] for part in join.views for column in part.columns]
    faults += [
        Fault(where=f"{where}: defaults", given=name, allowed=f"looked up columns: {', '.join(looked_up)}")
        for name in lookup.defaults
        if name not in looked_up
    ]
    width = _width(version)
    if width not in (None, len(features)):
        faults.append(
            Fault(where=f"{where}: features", given=f"{len(features)} columns", allowed=f"{width} columns")
        )
    duplicates = sorted({name for name in features if features.count(name) > 1})
    if duplicates:
        faults.append(
            Fault(where=f"{where}: features", given=", ".join(duplicates), allowed="each name once")
        )
    if faults:
        raise InvalidInput(f"{where} does not fit the model", faults=faults)


def _width(version: ModelVersion) -> int | None:
    """Return the number of columns of the model's only input, if known."""
    if len(version.inputs) != 1 or len(version.inputs[0].shape) != 2:
        return None
    return version.inputs[0].shape[1] if version.inputs[0].shape[1] > 0 else None
