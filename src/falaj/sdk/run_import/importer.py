"""Copies a source: what is stored is compared, only what is missing is sent, and all is counted at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from falaj.errors import AlreadyExists, Conflict, FalajError, Fault, InvalidInput, NotFound
from falaj.records.tracking import Experiment, ListedRun, MetricPoint
from falaj.sdk.run_import.comparison import (
    FittedRun,
    MissingParts,
    fit_run,
    missing_of_new,
    missing_parts,
    stored_counts,
)
from falaj.sdk.run_import.destination import Destination, NewRun
from falaj.sdk.run_import.fitting import fit_experiment_name, fit_run_name, fit_user, fit_values
from falaj.sdk.run_import.model_copies import ModelCopies, RunCopy
from falaj.sdk.run_import.report import ImportCount, ImportReport, RunCounts
from falaj.sdk.run_import.source import RunSource, SourceExperiment, SourceNotes, SourceRun

T = TypeVar("T")

COMPARED = 200
"""Runs that are compared at a time."""
ADVANCED = 1000
"""Points after which progress is reported."""
MOST_PROBLEMS = 20
TOLERATED = (InvalidInput, Conflict, NotFound)
"""What is wrong with one run only; anything else ends the import, which can be started again."""

Advance = Callable[[int], None]


@dataclass(frozen=True)
class ImportOptions:
    """`prefix` is put before the names of experiments. With `merge` runs are added to existing experiments of the same
    names, which is refused otherwise. Without `with_files` artifacts are left behind."""

    prefix: str = ""
    merge: bool = False
    with_files: bool = True


class RunImport:
    """One import of experiments into a workspace."""

    def __init__(
        self,
        source: RunSource,
        destination: Destination,
        options: ImportOptions,
        *,
        advance: Advance = lambda _rows: None,
    ) -> None:
        """`advance` is told how many runs and points are done."""
        self._source = source
        self._destination = destination
        self._options = options
        self._advance = advance
        self._notes = SourceNotes()
        self._problems: list[str] = []
        self._new = self._changed = self._duplicates = self._refused = 0
        self._experiments: dict[str, Experiment] = {}
        self._hidden: set[str] = set()
        self._known: dict[str, str] = {}
        self._copies: dict[str, RunCopy] = {}
        self._runs = self._sent = 0
        self._waiting: dict[str, list[SourceRun]] = {}
        self._models = ModelCopies(
            source,
            destination,
            self._copies,
            with_files=options.with_files,
            notes=self._notes,
            noting=self._noting,
        )

    def copy(self, chosen: Sequence[SourceExperiment]) -> ImportReport:
        """Copy these experiments with their runs, and return what is stored of them."""
        planned = self._planned(chosen)
        self._hidden = {each.id for each in chosen if each.is_deleted}
        for each in chosen:
            found = self._ensured(each, planned[each.id])
            if found is not None:
                self._experiments[each.id] = found
        kept = [each for each in chosen if each.id in self._experiments]
        for each in kept:
            self._copy_experiment(each)
        self._copy_orphans()
        for each in kept:
            self._models.copy(each, self._experiments[each.id].id)
        report = self._report(kept)
        for each in kept:
            if each.is_deleted:
                self._destination.delete_experiment(self._experiments[each.id].id)
        return report

    # -------------------------------------------------------------------------------------- experiments

    def _planned(self, chosen: Sequence[SourceExperiment]) -> dict[str, Experiment | str]:
        """Return the experiment for each, or the name of a new one; AlreadyExists before anything is made."""
        marked = self._destination.experiments()
        planned: dict[str, Experiment | str] = {}
        taken: set[str] = set()
        faults = []
        for each in chosen:
            if each.mark in marked:
                planned[each.id] = marked[each.mark]
                continue
            name = self._free_name(each, taken)
            taken.add(name)
            found = self._destination.experiment_named(name)
            if found is not None and not self._options.merge:
                faults.append(Fault(where="experiment", given=name, allowed="a name that is free here"))
            planned[each.id] = name if found is None else found
        if faults:
            raise AlreadyExists(
                f"experiments of these names exist, and were not made by an import of this source: {len(faults)}; "
                "nothing was copied. Add the runs to them by --merge, or name the new ones by --prefix",
                faults=faults[:MOST_PROBLEMS],
            )
        return planned

    def _free_name(self, experiment: SourceExperiment, taken: set[str]) -> str:
        wanted = self._options.prefix + experiment.name
        name = fit_experiment_name(wanted, otherwise=f"{self._source.kind} {experiment.id[:90]}")
        if name in taken:
            name = f"{name[:400]} ({experiment.id[:90]})"
        if name != wanted:
            self._notes.add("experiments with another name here", f"{wanted[:60]!r} is {name[:60]!r}")
        return name

    def _ensured(self, given: SourceExperiment, planned: Experiment | str) -> Experiment | None:
        """Return the experiment here, created or completed, or None if it was deleted here.

        One that is deleted in the source, too, is restored until the end of the import.
        """
        tags = fit_values(given.tags).values
        if isinstance(planned, str):
            return self._destination.create_experiment(planned, mark=given.mark, tags=tags)
        if planned.deleted_at is not None:
            if not given.is_deleted:
                self._notes.add("experiments that were deleted here, and are left out", planned.name)
                return None
            self._destination.restore_experiment(planned.id)
        known = {tag.key for tag in planned.tags}
        if missing := {key: value for key, value in tags.items() if key not in known}:
            self._destination.tag_experiment(planned.id, missing)
        for mark, ident in self._destination.runs(planned.id):
            self._duplicates += self._known.setdefault(mark, ident) != ident
        return planned

    # --------------------------------------------------------------------------------------------- runs

    def _copy_experiment(self, experiment: SourceExperiment) -> None:
        for chunk in batched(self._source.runs(experiment), COMPARED):
            stored = self._stored(chunk)
            for run in chunk:
                self._runs += 1
                if run.parent is None or run.parent in self._copies:
                    self._copy_tree(run, stored)
                else:
                    self._waiting.setdefault(run.parent, []).append(run)

    def _copy_tree(self, run: SourceRun, stored: Mapping[str, ListedRun]) -> None:
        """Copy a run, then those that wait for it as their parent."""
        self._copy(run, stored)
        waiting = self._waiting.pop(run.id, [])
        while waiting:
            each = waiting.pop()
            self._copy(each, self._stored([each]))
            waiting += self._waiting.pop(each.id, [])

    def _copy_orphans(self) -> None:
        """Copy the runs whose parents are not in the source, or are not copied."""
        while self._waiting:
            _, runs = self._waiting.popitem()
            for each in runs:
                self._notes.add("runs whose parents are not copied", each.id[:80])
                self._copy_tree(each, self._stored([each]))

    def _stored(self, runs: Sequence[SourceRun]) -> dict[str, ListedRun]:
        known = (self._known.get(self._mark(each)) for each in runs)
        return self._destination.details([each for each in known if each is not None])

    def _mark(self, run: SourceRun) -> str:
        return f"{self._source.kind}:{run.id}"

    def _copy(self, run: SourceRun, stored: Mapping[str, ListedRun]) -> None:
        """Copy what is missing of a run. One that was deleted here, and not in the source, stays as it is."""
        self._sent = 0
        with self._noting(f"run {run.id[:80]}"):
            files = self._source.files(run) if self._options.with_files else ()
            fitted = fit_run(run, self._source.series(run), files)
            self._note_names(fitted)
            found = stored.get(self._known.get(self._mark(run), ""))
            if found is None:
                ident = self._start(fitted)
                self._copies[run.id] = RunCopy(ident, fitted.counts, self._is_deleted(run))
                self._new += 1
                self._complete(fitted, ident, missing_of_new(fitted))
                self._settle(run, ident, None)
            elif found.deleted_at is not None and not self._is_deleted(run):
                self._notes.add("runs that were deleted here, and are left out", found.name)
                self._runs -= 1
            else:
                self._copies[run.id] = RunCopy(found.id, fitted.counts, self._is_deleted(run))
                self._renew(fitted, found)
            self._advance(1 + sum(fitted.series.values()) - self._sent // ADVANCED * ADVANCED)

    def _start(self, fitted: FittedRun) -> str:
        run = fitted.run
        parent = self._copies.get(run.parent or "")
        new = NewRun(
            experiment=self._experiments[run.experiment].id,
            mark=self._mark(run),
            name=fit_run_name(run.name, otherwise=run.id[:100]),
            user=fit_user(run.user),
            parent=None if parent is None else parent.id,
            started_at=run.started_at,
            status=run.status,
        )
        return self._destination.start(new, params=fitted.params.values, tags=fitted.tags.values)

    def _renew(self, fitted: FittedRun, found: ListedRun) -> None:
        """Send what a stored run lacks; a deleted one is restored for that time."""
        files = self._destination.files(found.id) if fitted.files else {}
        missing = missing_parts(fitted, found, files)
        if missing.is_any:
            self._changed += 1
            if found.deleted_at is not None:
                self._destination.restore(found.id)
                found = found.model_copy(update={"deleted_at": None})
            self._complete(fitted, found.id, missing)
        self._settle(fitted.run, found.id, found)

    def _complete(self, fitted: FittedRun, ident: str, missing: MissingParts) -> None:
        """Send parts of a run; one that is refused does not keep the others back."""
        run = fitted.run
        with self._noting(f"run {run.id[:80]}"):
            self._destination.add_values(ident, params=missing.params, tags=missing.tags)
        with self._noting(f"run {run.id[:80]}"):
            self._destination.add_points(ident, self._points(fitted, missing.keys))
        for dataset in missing.datasets:
            with self._noting(f"run {run.id[:80]}"):
                self._destination.add_dataset(ident, dataset)
        for file in missing.files:
            with self._noting(f"run {run.id[:80]}"):
                data = self._source.read(run, file.path) if file.text is None else iter([file.text])
                self._destination.add_file(ident, file.path, data)

    def _points(self, fitted: FittedRun, keys: frozenset[str]) -> Iterator[MetricPoint]:
        for point in self._source.points(fitted.run, keys):
            self._sent += 1
            if self._sent % ADVANCED == 0:
                self._advance(ADVANCED)
            yield MetricPoint(
                key=fitted.keys[point.key], value=point.value, step=point.step, timestamp=point.at
            )

    def _settle(self, run: SourceRun, ident: str, found: ListedRun | None) -> None:
        """Give a run the state that it has in the source; this comes last."""
        if run.status.ended and (found is None or not found.status.ended):
            self._destination.end(ident, status=run.status, ended_at=run.ended_at or run.started_at)
        if self._is_deleted(run) and (found is None or found.deleted_at is None):
            self._destination.delete(ident)

    def _is_deleted(self, run: SourceRun) -> bool:
        """Return whether a run is deleted by itself: one of a deleted experiment goes and comes back with that."""
        return run.is_deleted and run.experiment not in self._hidden

    def _note_names(self, fitted: FittedRun) -> None:
        for key, name in fitted.keys.items():
            if key != name:
                self._notes.add("metrics with another name here", f"{key[:60]!r} is {name[:60]!r}")
        if fitted.params.long or fitted.tags.long:
            self._notes.add("runs with texts that are cut, and whole in an artifact", fitted.run.id[:80])

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Keep what is wrong with one run or model from ending the import."""
        try:
            yield
        except TOLERATED as error:
            self._refused += 1
            if len(self._problems) < MOST_PROBLEMS:
                self._problems.append(f"{what}: {_in_one_line(error)}")

    # ------------------------------------------------------------------------------------------- counts

    def _report(self, chosen: Sequence[SourceExperiment]) -> ImportReport:
        """Return what the source has and what is stored of that, read again from the platform."""
        copies = list(self._copies.values())
        found = 0
        expected, here = RunCounts(), RunCounts()
        for chunk in batched(copies, COMPARED):
            stored = self._destination.details([each.id for each in chunk])
            found += len(stored)
            for each in chunk:
                expected = expected.plus(each.expected)
                if each.id in stored:
                    files = self._destination.files(each.id) if each.expected.artifacts else {}
                    here = here.plus(stored_counts(stored[each.id], files).within(each.expected))
        made = sum(each.id in self._experiments for each in chosen)
        models, models_expected, models_here = self._models.counts()
        expected, here = expected.plus(models_expected), here.plus(models_here)
        counts = [
            ImportCount(what="experiments", source=len(chosen), here=made),
            ImportCount(what="runs", source=self._runs, here=found + self._duplicates),
            ImportCount(what="logged models", source=self._models.found, here=models),
        ]
        for name, wanted, stored_count in zip(RunCounts._fields, expected, here, strict=True):
            counts.append(ImportCount(what=name.replace("_", " "), source=wanted, here=stored_count))
        if self._duplicates:
            self._problems.insert(0, f"runs that are here more than once: {self._duplicates}")
        if self._refused > len(self._problems):
            self._problems.append(f"and {self._refused - len(self._problems)} more")
        return ImportReport(
            source=self._source.where,
            kind=self._source.kind,
            complete=not self._problems and all(each.source == each.here for each in counts),
            new_runs=self._new,
            changed_runs=self._changed,
            counts=tuple(counts),
            problems=tuple(self._problems),
            notes=self._notes.lines() + self._source.notes.lines(),
        )


def batched(given: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of up to `size` of them."""
    iterator = iter(given)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _in_one_line(error: FalajError) -> str:
    faults = "; ".join(
        f"{fault.where}: given {fault.given}, allowed {fault.allowed}" for fault in error.faults[:2]
    )
    return f"{error.message} ({faults})" if faults else error.message
