"""Feature lookup: which columns of a model's input come from views, and which from the request."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import nan

from falaj.errors import Fault, InvalidInput
from falaj.records.registry import ModelVersion
from falaj.records.serving.lookups import Lookup, MissingRule

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
class FeatureJoin:
    """How a row of the model's input is assembled; `passed` maps request inputs to columns.

    A column without a value gets that of `defaults`; a request that lacks one of the `required` columns is rejected.
    """

    columns: tuple[str, ...]
    views: tuple[ViewColumns, ...]
    passed: tuple[tuple[str, int], ...]
    defaults: tuple[float, ...]
    required: frozenset[int]
    optional: frozenset[str] = frozenset()
    """Inputs that a request may leave out, because they have a default."""

    @property
    def width(self) -> int:
        return len(self.columns)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the inputs that a request has; it may leave out those that are optional."""
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
            max_age=view.max_age,
        )
        for number, view in enumerate(lookup.views)
    )
    rules = _rules(lookup, names, parts)
    return FeatureJoin(
        columns=names,
        views=parts,
        passed=tuple(passed),
        defaults=tuple(_default(lookup, name, rule) for name, rule in zip(names, rules, strict=True)),
        required=frozenset(column for column, rule in enumerate(rules) if rule == "reject"),
        optional=frozenset(name for name, _ in passed if name in lookup.defaults),
    )


def _rules(lookup: Lookup, names: Sequence[str], parts: Sequence[ViewColumns]) -> list[MissingRule]:
    """Return the rule of each column: its own default, else that of its view, else that of the lookup."""
    rules: list[MissingRule] = [lookup.missing] * len(names)
    for view, part in zip(lookup.views, parts, strict=True):
        for column in part.columns:
            rules[column] = lookup.missing if view.missing is None else view.missing
    return [lookup.defaults.get(name, rule) for name, rule in zip(names, rules, strict=True)]


def _default(lookup: Lookup, name: str, rule: MissingRule) -> float:
    if rule == "impute":
        return lookup.imputed.get(name, nan)
    return nan if rule is None or isinstance(rule, str) else float(rule)


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
    faults += [
        Fault(where=f"{where}: defaults", given=name, allowed=f"the columns {', '.join(join.columns)}")
        for name in lookup.defaults
        if name not in join.columns
    ]
    faults += _impute_faults(lookup, join, where)
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


def _impute_faults(lookup: Lookup, join: FeatureJoin, where: str) -> list[Fault]:
    """Return a fault for each feature that is to be imputed and has no value, and each value without a feature."""
    looked_up = [join.columns[column] for part in join.views for column in part.columns]
    rules = dict(zip(join.columns, _rules(lookup, join.columns, join.views), strict=True))
    lacking = [name for name in looked_up if rules[name] == "impute" and name not in lookup.imputed]
    faults = [
        Fault(
            where=f"{where}: imputed",
            given=f"no value for {name}",
            allowed="one for each feature that is imputed, such as its mean in the training set",
            fix=f"deploy --impute {name}=NUMBER",
        )
        for name in lacking
    ]
    unknown = [name for name in lookup.imputed if name not in looked_up]
    allowed = f"looked up columns: {', '.join(looked_up)}"
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
