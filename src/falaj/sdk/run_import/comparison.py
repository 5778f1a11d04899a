"""A run of a source as it is to be stored, compared with what is stored of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from falaj.records.tracking import DatasetInput, ListedRun
from falaj.sdk.run_import.destination import OWN_TAGS
from falaj.sdk.run_import.fitting import FittedValues, fit_keys, fit_values, long_values
from falaj.sdk.run_import.report import RunCounts
from falaj.sdk.run_import.source import SourceFile, SourceRun


@dataclass(frozen=True)
class FittedRun:
    """A run with valid names and texts; `keys` are its metrics here by their names in the source."""

    run: SourceRun
    params: FittedValues
    tags: FittedValues
    keys: Mapping[str, str]
    series: Mapping[str, int]
    files: Sequence[SourceFile]

    @property
    def counts(self) -> RunCounts:
        return RunCounts(
            params=len(self.params.values),
            tags=len(self.tags.values),
            points=sum(self.series.values()),
            datasets=len({(each.name, each.digest) for each in self.run.datasets}),
            artifacts=len(self.files),
            artifact_bytes=sum(each.size_bytes for each in self.files),
        )


def fit_run(run: SourceRun, series: Mapping[str, int], files: Sequence[SourceFile]) -> FittedRun:
    """Return a run as it is to be stored. `series` has the number of points of each metric."""
    params, tags, keys = fit_values(run.params), fit_values(run.tags), fit_keys(series)
    long = long_values(params=params, tags=tags)
    return FittedRun(
        run=run,
        params=params,
        tags=tags,
        keys=keys,
        series=series,
        files=[*files, *([] if long is None else [long])],
    )


@dataclass(frozen=True)
class MissingParts:
    """What a run lacks here; `keys` are the metrics, as the source names them, that have fewer points here."""

    params: Mapping[str, str]
    tags: Mapping[str, str]
    keys: frozenset[str]
    datasets: Sequence[DatasetInput]
    files: Sequence[SourceFile]

    @property
    def is_any(self) -> bool:
        return any((self.params, self.tags, self.keys, self.datasets, self.files))


def missing_of_new(fitted: FittedRun) -> MissingParts:
    """Return what a run lacks that was started with its parameters and tags."""
    return MissingParts({}, {}, frozenset(fitted.series), fitted.run.datasets, fitted.files)


def missing_parts(fitted: FittedRun, stored: ListedRun, files: Mapping[str, int]) -> MissingParts:
    """Return what a stored run lacks. What has another value here was changed here, and stays; a file of another size
    is sent again."""
    params, tags = {each.key for each in stored.params}, {each.key for each in stored.tags}
    points = {each.key: each.points for each in stored.metrics}
    datasets = {(each.name, each.digest) for each in stored.datasets}
    return MissingParts(
        params={key: value for key, value in fitted.params.values.items() if key not in params},
        tags={key: value for key, value in fitted.tags.values.items() if key not in tags},
        keys=frozenset(
            key for key, count in fitted.series.items() if points.get(fitted.keys[key], 0) < count
        ),
        datasets=[each for each in fitted.run.datasets if (each.name, each.digest) not in datasets],
        files=[each for each in fitted.files if files.get(each.path) != each.size_bytes],
    )


def stored_counts(stored: ListedRun, files: Mapping[str, int]) -> RunCounts:
    return RunCounts(
        params=len(stored.params),
        tags=sum(not each.key.startswith(OWN_TAGS) for each in stored.tags),
        points=sum(each.points for each in stored.metrics),
        datasets=len(stored.datasets),
        artifacts=len(files),
        artifact_bytes=sum(files.values()),
    )
