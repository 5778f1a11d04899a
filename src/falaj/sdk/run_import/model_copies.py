"""Copies logged models of MLflow 3: their files, parameters, tags and metrics, and the runs that made them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from falaj.records.tracking import LoggedModel, MetricPoint
from falaj.sdk.run_import.destination import OWN_TAGS, Destination, NewModel
from falaj.sdk.run_import.fitting import fit_keys, fit_run_name, fit_values, long_values
from falaj.sdk.run_import.report import RunCounts
from falaj.sdk.run_import.source import RunSource, SourceExperiment, SourceFile, SourceModel, SourceNotes


class RunCopy(NamedTuple):
    """The id of a copied run, what it must consist of, and whether it takes no more because it is deleted."""

    id: str
    expected: RunCounts
    is_deleted: bool = False


class ModelCopies:
    """The logged models of an import."""

    def __init__(
        self,
        source: RunSource,
        destination: Destination,
        runs: Mapping[str, RunCopy],
        *,
        with_files: bool,
        notes: SourceNotes,
        noting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """`runs` are the copies by their ids in the source; `noting` keeps what is wrong with one model to that one."""
        self._source = source
        self._destination = destination
        self._runs = runs
        self._with_files = with_files
        self._notes = notes
        self._noting = noting
        self._copies: dict[str, RunCounts] = {}
        self.found = 0

    def copy(self, experiment: SourceExperiment, home: str) -> None:
        """Copy the logged models of an experiment into `home`."""
        stored: dict[str, LoggedModel] | None = None
        for model in self._source.models(experiment):
            self.found += 1
            stored = self._destination.models(home) if stored is None else stored
            with self._noting(f"logged model {model.id[:80]}"):
                self._copy(model, home, stored.get(f"{self._source.kind}:{model.id}"))

    def _copy(self, model: SourceModel, home: str, stored: LoggedModel | None) -> None:
        if stored is not None and stored.deleted_at is not None and not model.is_deleted:
            self._notes.add("logged models that were deleted here, and are left out", stored.name)
            self.found -= 1
            return
        params, tags = fit_values(model.params), fit_values(model.tags)
        long = long_values(params=params, tags=tags)
        files = [*(self._source.files(model) if self._with_files else ()), *([long] if long else [])]
        run = self._runs.get(model.run or "")
        if stored is None:
            new = NewModel(
                experiment=home,
                mark=f"{self._source.kind}:{model.id}",
                name=fit_run_name(model.name, otherwise=model.id[:100]),
                type=model.type,
                run=None if run is None else run.id,
            )
            ident = self._destination.create_model(new, params=params.values, tags=tags.values)
        else:
            ident = str(stored.id)
        self._copies[ident] = RunCounts(
            params=len(params.values),
            tags=len(tags.values),
            artifacts=len(files),
            artifact_bytes=sum(each.size_bytes for each in files),
        )
        self._add_files(model, ident, files)
        if stored is None or stored.status != model.status:
            self._add_points(model, ident)
            if run is not None and not run.is_deleted:
                self._destination.link_model(run.id, ident)
            if model.status != "pending":
                self._destination.finalize_model(ident, model.status)
        if model.is_deleted and (stored is None or stored.deleted_at is None):
            self._destination.delete_model(ident)

    def _add_files(self, model: SourceModel, ident: str, files: list[SourceFile]) -> None:
        known = self._destination.model_files(ident) if files else {}
        for file in files:
            if known.get(file.path) != file.size_bytes:
                data = self._source.read(model, file.path) if file.text is None else iter([file.text])
                self._destination.add_model_file(ident, file.path, data)

    def _add_points(self, model: SourceModel, ident: str) -> None:
        """Send the metrics of a model: points that its runs have, which name it now.

        The value is that of the run: MLflow keeps the NaN of a model as 0.
        """
        names = fit_keys(each.point.key for each in model.points)
        for each in model.points:
            run = self._runs.get(each.run)
            if run is None or run.is_deleted:
                continue
            key, step, at = names[each.point.key], each.point.step, each.point.at
            values = self._destination.values_at(run.id, key, step=step, at=at)
            if each.point.value not in values and len(values) != 1:
                self._notes.add("metrics of logged models that their runs do not have", f"{model.id} {key}")
                continue
            point = MetricPoint(
                key=key,
                value=each.point.value if each.point.value in values else values[0],
                step=step,
                timestamp=at,
                model=ident,
                dataset=each.dataset,
                dataset_digest=each.dataset_digest,
            )
            self._destination.add_points(run.id, [point])

    def counts(self) -> tuple[int, RunCounts, RunCounts]:
        """Return how many are stored, what all of them must consist of, and what they do."""
        stored, expected, here = 0, RunCounts(), RunCounts()
        for ident, wanted in self._copies.items():
            model = self._destination.model(ident)
            files = self._destination.model_files(ident) if wanted.artifacts else {}
            own = sum(not each.key.startswith(OWN_TAGS) for each in model.tags)
            found = RunCounts(
                params=len(model.params),
                tags=own,
                artifacts=len(files),
                artifact_bytes=sum(files.values()),
            )
            stored, expected, here = stored + 1, expected.plus(wanted), here.plus(found.within(wanted))
        return stored, expected, here
