"""Which columns of a model's input come from views, which from the request, and which are computed from both."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import nan

from falaj.errors import Fault, InvalidInput
from falaj.records.features import ColumnType
from falaj.records.registry import ModelVersion
from falaj.records.serving.lookups import Lookup, MissingRule, VersionLookup
from falaj.records.serving.tensors import Datatype

AGES_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 21_600.0, 86_400.0, 604_800.0)
"""Upper bounds of the buckets for the age of features, in seconds; one more holds the rest."""


@dataclass(frozen=True, slots=True)
class ViewColumns:
    """Columns that are read from one view; `keys` are the request inputs that form its key."""

    view: str
    name: str
    keys: tuple[str, ...]
    features: tuple[str, ...]
    columns: tuple[int, ...]
    max_age: timedelta | None = None
    """Older values count as missing."""


@dataclass(frozen=True, slots=True)
class ComputedColumn:
    """A request-time feature; `column` is its place in the model's input, none if only others are computed from it."""

    name: str
    expression: str
    column: int | None


@dataclass(frozen=True, slots=True)
class JoinVariable:
    """A name in the expressions: a column that is looked up, or an input of the request."""

    name: str
    type: ColumnType
    column: int | None


@dataclass(frozen=True, slots=True)
class FeatureJoin:
    """How a row of the model's input is assembled; `passed` maps request inputs to columns.

    A column without a value gets that of `defaults`; a request that lacks one of the `required` columns is rejected.
    Columns behind the `width` of the model's input are looked up for the `computed` ones only.
    """

    columns: tuple[str, ...]
    views: tuple[ViewColumns, ...]
    passed: tuple[tuple[str, int], ...]
    defaults: tuple[float, ...]
    required: frozenset[int]
    optional: frozenset[str] = frozenset()
    """Inputs that a request may leave out, because they have a default."""
    width: int = 0
    computed: tuple[ComputedColumn, ...] = ()
    variables: tuple[JoinVariable, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the inputs that a request has; it may leave out those that are optional."""
        keys = [key for part in self.views for key in part.keys]
        used = [each.name for each in self.variables if each.column is None]
        return tuple(dict.fromkeys([*keys, *(name for name, _ in self.passed), *used]))

    def datatype_of(self, name: str) -> Datatype:
        """Return the type of an input of a request that is no key."""
        found = next((each.type for each in self.variables if each.name == name), ColumnType.FLOAT)
        return DATATYPES[found]


DATATYPES = {
    ColumnType.FLOAT: Datatype.FP64,
    ColumnType.INTEGER: Datatype.INT64,
    ColumnType.BOOLEAN: Datatype.BOOL,
    ColumnType.TEXT: Datatype.BYTES,
    ColumnType.MOMENT: Datatype.BYTES,
}
"""The types of inputs that expressions use; a moment is a text, as of ISO 8601."""


def build_join(lookup: Lookup, features: Sequence[str], *, version: str) -> FeatureJoin:
    """Build the join for a version with columns `features`, unless `lookup` names others. Its views are resolved."""
    own = lookup.version(version)
    width = len(lookup.features or features)
    names, computed, variables = _with_computed(lookup, lookup.features or tuple(features), own)
    made = {each.column for each in computed}
    taken: dict[int, dict[int, str]] = {number: {} for number in range(len(lookup.views))}
    passed = []
    for column, name in enumerate(names):
        if column in made:
            continue
        source = find_feature(lookup, name)
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
            max_age=view.max_age,
        )
        for number, view in enumerate(lookup.views)
    )
    rules = _rules(lookup, names, parts)
    return FeatureJoin(
        columns=names,
        views=parts,
        passed=tuple(passed),
        defaults=tuple(_default(lookup, own, name, rule) for name, rule in zip(names, rules, strict=True)),
        required=frozenset(column for column, rule in enumerate(rules) if rule == "reject"),
        optional=frozenset(name for name, _ in passed if name in lookup.defaults),
        width=width,
        computed=computed,
        variables=variables,
    )


def _with_computed(
    lookup: Lookup, names: tuple[str, ...], own: VersionLookup
) -> tuple[tuple[str, ...], tuple[ComputedColumn, ...], tuple[JoinVariable, ...]]:
    """Return the columns with those behind them that expressions need, what is computed, and from which names."""
    made = {each.name for each in own.request_features}
    places = {name: column for column, name in enumerate(names)}
    computed = tuple(
        ComputedColumn(each.name, each.expression, places.get(each.name)) for each in own.request_features
    )
    used = {name: kind for each in own.request_features for name, kind in each.inputs.items()}
    behind = [name for name in used if name not in made | places.keys() and is_looked_up(lookup, name)]
    places |= {name: len(names) + number for number, name in enumerate(behind)}
    variables = tuple(
        JoinVariable(name, kind, places[name] if is_looked_up(lookup, name) else None)
        for name, kind in used.items()
        if name not in made
    )
    return (*names, *behind), computed, variables


def is_looked_up(lookup: Lookup, name: str) -> bool:
    """Tell whether a name in an expression is a feature of a view, `view__feature`, and no input of the request."""
    return any(name == f"{view.name}__{feature}" for view in lookup.views for feature in view.features)


def _rules(lookup: Lookup, names: Sequence[str], parts: Sequence[ViewColumns]) -> list[MissingRule]:
    """Return the rule of each column: its own default, else that of its view, else that of the lookup."""
    rules: list[MissingRule] = [lookup.missing] * len(names)
    for view, part in zip(lookup.views, parts, strict=True):
        for column in part.columns:
            rules[column] = lookup.missing if view.missing is None else view.missing
    return [lookup.defaults.get(name, rule) for name, rule in zip(names, rules, strict=True)]


def _default(lookup: Lookup, own: VersionLookup, name: str, rule: MissingRule) -> float:
    if rule == "impute":
        return lookup.imputed.get(name, own.imputed.get(name, nan))
    return nan if rule is None or isinstance(rule, str) else float(rule)


def find_feature(lookup: Lookup, name: str) -> tuple[int, str] | None:
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
    faults = lookup_faults(lookup, features, version=str(version.number), where=where)
    width = _width(version)
    if width not in (None, len(features)):
        faults.append(
            Fault(where=f"{where}: features", given=f"{len(features)} columns", allowed=f"{width} columns")
        )
    if faults:
        raise InvalidInput(f"{where} does not fit the model", faults=faults)


def lookup_faults(lookup: Lookup, features: Sequence[str], *, version: str, where: str) -> list[Fault]:
    """Return the faults of a resolved lookup that is to have the columns `features`."""
    join = build_join(lookup, features, version=version)
    faults = [
        Fault(where=f"{where}: view {part.name}", given="none of its features", allowed=", ".join(features))
        for part in join.views
        if not part.columns
    ]
    faults += [
        Fault(where=f"{where}: defaults", given=name, allowed=f"the columns {', '.join(features)}")
        for name in lookup.defaults
        if name not in join.columns[: join.width]
    ]
    faults += _impute_faults(lookup, lookup.version(version), join, where)
    faults += [
        Fault(where=f"{where}: request_features", given=each.name, allowed=f"one of {', '.join(features)}")
        for each in lookup.request_features
        if each.name not in {made.name for made in join.computed}
    ]
    duplicates = sorted({name for name in features if features.count(name) > 1})
    if duplicates:
        faults.append(
            Fault(where=f"{where}: features", given=", ".join(duplicates), allowed="each name once")
        )
    return faults


def imputed_columns(lookup: Lookup, join: FeatureJoin) -> list[str]:
    """Return the columns of the model that are looked up or computed, and imputed where they have no value."""
    rules = dict(zip(join.columns, _rules(lookup, join.columns, join.views), strict=True))
    return [name for name in _found_columns(join) if rules[name] == "impute"]


def _found_columns(join: FeatureJoin) -> list[str]:
    """Return the columns of the model that do not come from the request as they are."""
    looked_up = [column for part in join.views for column in part.columns if column < join.width]
    made = [each.column for each in join.computed if each.column is not None]
    return [join.columns[column] for column in sorted([*looked_up, *made])]


def _impute_faults(lookup: Lookup, own: VersionLookup, join: FeatureJoin, where: str) -> list[Fault]:
    """Return a fault for each feature that is to be imputed and has no value, and each value without a feature."""
    known = lookup.imputed.keys() | own.imputed.keys()
    faults = [
        Fault(
            where=f"{where}: imputed",
            given=f"no value for {name}: neither the training set of the version nor the view has any",
            allowed="a number for each feature that is imputed",
            fix=f"deploy --impute {name}=NUMBER",
        )
        for name in imputed_columns(lookup, join)
        if name not in known
    ]
    looked_up = _found_columns(join)
    unknown = [name for name in lookup.imputed if name not in looked_up]
    allowed = f"looked up and computed columns: {', '.join(looked_up)}"
    return faults + [Fault(where=f"{where}: imputed", given=name, allowed=allowed) for name in unknown]


class LookupMeter:
    """Counts what the lookups of an endpoint missed, and how old what they found was. Used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.missing: Counter[tuple[str, str]] = Counter()
        """Missing values by view and reason."""
        self.ages = [0] * (len(AGES_S) + 1)
        self.age_sum_s = 0.0

    def count(self, missing: Mapping[tuple[str, str], int], age_s: float | None) -> None:
        """Count a request: its missing values, and the age of its oldest feature, if it has one."""
        with self._lock:
            for key, number in missing.items():
                self.missing[key] += number
            if age_s is not None:
                self.ages[bisect_left(AGES_S, age_s)] += 1
                self.age_sum_s += age_s


def _width(version: ModelVersion) -> int | None:
    """Return the number of columns of the model's only input, if known."""
    if len(version.inputs) != 1 or len(version.inputs[0].shape) != 2:
        return None
    return version.inputs[0].shape[1] if version.inputs[0].shape[1] > 0 else None
