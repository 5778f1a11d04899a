"""The side of the platform in an import: what is stored there of a source, and the operations that add to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from falaj.errors import NotFound, TooLarge
from falaj.governance.operations.caller import once
from falaj.records.governance.objects import Page
from falaj.records.tracking import (
    BATCH_POINTS,
    DatasetInput,
    Experiment,
    ListedRun,
    LoggedModel,
    LoggedModelStatus,
    MetricPoint,
    ModelLink,
    RunStatus,
)

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform

OWN_TAGS = "falaj.import."
EXPERIMENT_TAG, RUN_TAG, MODEL_TAG = (f"{OWN_TAGS}{kind}" for kind in ("experiment", "run", "model"))
PAGE = 1000
BODY_BYTES = 900_000
"""The size of a request, as far as it is known before it is written; a platform takes 1 MiB by default."""
POINT_BYTES = 170
VALUES_PER_CALL = 1000


class NewRun(NamedTuple):
    """A run to start: its experiment here, and what tells it from all others of its source."""

    experiment: str
    mark: str
    name: str
    user: str | None
    parent: str | None
    started_at: datetime | None
    status: RunStatus


class NewModel(NamedTuple):
    """A logged model to create: its experiment and run here, and what tells it from all others of its source."""

    experiment: str
    mark: str
    name: str
    type: str
    run: str | None


class Destination:
    """A workspace that runs are copied to, as the caller."""

    def __init__(self, platform: Platform, workspace: str | None) -> None:
        self._platform = platform
        self._where: dict[str, Any] = {} if workspace is None else {"workspace": workspace}

    # -------------------------------------------------------------------------------------- experiments

    def experiments(self) -> dict[str, Experiment]:
        """Return the experiments that imports made, also deleted ones, by their marks."""
        found: dict[str, Experiment] = {}
        for each in self._listed(
            self._platform.experiments.list, where=f"tags.`{EXPERIMENT_TAG}` IS NOT NULL", view="all"
        ):
            mark = next(tag.value for tag in each.tags if tag.key == EXPERIMENT_TAG)
            found.setdefault(mark, each)
        return found

    def experiment_named(self, name: str) -> Experiment | None:
        try:
            return self._platform.experiments.find(name, **self._where)
        except NotFound:
            return None

    def create_experiment(self, name: str, *, mark: str, tags: Mapping[str, str]) -> Experiment:
        first, *others = split_values({EXPERIMENT_TAG: mark, **tags})
        made = self._platform.experiments.create(name, tags=first, **self._where)
        for more in others:
            self._platform.experiments.set_tags(made.id, more)
        return made

    def tag_experiment(self, experiment: str, tags: Mapping[str, str]) -> None:
        for some in split_values(tags):
            self._platform.experiments.set_tags(experiment, some)

    def delete_experiment(self, experiment: str) -> None:
        self._platform.experiments.delete(experiment)

    def restore_experiment(self, experiment: str) -> None:
        self._platform.experiments.restore(experiment)

    # --------------------------------------------------------------------------------------------- runs

    def runs(self, experiment: str) -> Iterator[tuple[str, str]]:
        """Yield mark and id of the copies in an experiment, also deleted ones."""
        for each in self._listed(
            self._platform.runs.list,
            experiments=(experiment,),
            where=f"tags.`{RUN_TAG}` IS NOT NULL",
            view="all",
            show=("tags",),
        ):
            yield next(tag.value for tag in each.tags if tag.key == RUN_TAG), each.id

    def details(self, runs: Sequence[str]) -> dict[str, ListedRun]:
        """Return up to 500 runs with what is stored of them, but for their files, by id."""
        if not runs:
            return {}
        idents = ", ".join(f"'{each}'" for each in runs)
        found = self._listed(
            self._platform.runs.list,
            where=f"run_id IN ({idents})",
            view="all",
            show=("params", "tags", "metrics", "datasets"),
        )
        return {each.id: each for each in found}

    def files(self, run: str) -> dict[str, int]:
        """Return the sizes of a run's artifacts by path."""
        return {each.path: each.size_bytes for each in self._platform.runs.show(run).artifacts}

    def start(self, new: NewRun, *, params: Mapping[str, str], tags: Mapping[str, str]) -> str:
        """Start a run with its parameters and tags, and return its id. Of two imports at once one starts it."""
        first, *others = split_pairs(params, {RUN_TAG: new.mark, **tags})
        with once(_key(new)):
            started = self._platform.runs.start(
                new.experiment,
                name=new.name,
                params=first[0],
                tags=first[1],
                parent=new.parent,
                status=RunStatus.SCHEDULED if new.status is RunStatus.SCHEDULED else RunStatus.RUNNING,
                started_at=new.started_at,
                user=new.user,
                **self._where,
            )
        for more_params, more_tags in others:
            self._platform.runs.log_batch(started.id, params=more_params, tags=more_tags)
        return started.id

    def add_values(self, run: str, *, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        for some_params, some_tags in split_pairs(params, tags):
            self._platform.runs.log_batch(run, params=some_params, tags=some_tags)

    def add_points(self, run: str, points: Iterable[MetricPoint]) -> None:
        """Add points in batches; those that are stored are not stored again."""
        batch: list[MetricPoint] = []
        size = 0
        for point in points:
            batch.append(point)
            size += POINT_BYTES + len(point.key.encode())
            if size >= BODY_BYTES or len(batch) >= BATCH_POINTS:
                self._send_points(run, batch)
                batch, size = [], 0
        if batch:
            self._send_points(run, batch)

    def _send_points(self, run: str, points: Sequence[MetricPoint]) -> None:
        """Send points in one request, or in two if the platform takes smaller ones only."""
        try:
            self._platform.runs.log_metrics(run, tuple(points))
        except TooLarge:
            if len(points) == 1:
                raise
            middle = len(points) // 2
            self._send_points(run, points[:middle])
            self._send_points(run, points[middle:])

    def values_at(self, run: str, key: str, *, step: int, at: datetime) -> list[float]:
        """Return the values of a metric of a run at a step and a time."""
        return [
            point.value
            for history in self._platform.runs.history(run, key, from_step=step, limit=PAGE).items
            for point in history.points
            if (point.step, point.timestamp) == (step, at)
        ]

    def add_dataset(self, run: str, dataset: DatasetInput) -> None:
        self._platform.runs.log_inputs(run, datasets=(dataset,))

    def add_file(self, run: str, path: str, data: Iterator[bytes]) -> None:
        self._platform.runs.upload_artifact(run, path, data)

    def end(self, run: str, *, status: RunStatus, ended_at: datetime | None) -> None:
        self._platform.runs.update(run, status=status, ended_at=ended_at)

    def delete(self, run: str) -> None:
        self._platform.runs.delete(run)

    def restore(self, run: str) -> None:
        self._platform.runs.restore(run)

    # ------------------------------------------------------------------------------------ logged models

    def models(self, experiment: str) -> dict[str, LoggedModel]:
        """Return the copied models of an experiment, also deleted ones, by their marks."""
        found = self._listed(
            self._platform.loggedmodels.list,
            experiments=(experiment,),
            where=f"tags.`{MODEL_TAG}` IS NOT NULL",
            view="all",
        )
        return {next(tag.value for tag in each.tags if tag.key == MODEL_TAG): each for each in found}

    def model(self, model: str) -> LoggedModel:
        return self._platform.loggedmodels.show(model)

    def create_model(self, new: NewModel, *, params: Mapping[str, str], tags: Mapping[str, str]) -> str:
        """Create a model with its parameters and tags, and return its id."""
        first, *others = split_pairs(params, {MODEL_TAG: new.mark, **tags})
        operations = self._platform.loggedmodels
        with once(_key(new)):
            made = operations.create(
                new.experiment,
                name=new.name,
                model_type=new.type,
                source_run=new.run,
                params=first[0],
                tags=first[1],
            )
        for more_params, more_tags in others:
            if more_params:
                operations.log_params(made.id, more_params)
            if more_tags:
                operations.set_tags(made.id, more_tags)
        return made.id

    def model_files(self, model: str) -> dict[str, int]:
        """Return the sizes of a model's files by path."""
        found: dict[str, int] = {}
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            after: str | None = ""
            while after is not None:
                page = self._platform.loggedmodels.artifacts(model, folder=folder, after=after, limit=PAGE)
                waiting += [each.path for each in page.items if each.is_folder]
                found |= {each.path: each.size_bytes or 0 for each in page.items if not each.is_folder}
                after = page.next
        return found

    def add_model_file(self, model: str, path: str, data: Iterator[bytes]) -> None:
        self._platform.loggedmodels.upload_artifact(model, path, data)

    def link_model(self, run: str, model: str) -> None:
        self._platform.runs.log_outputs(run, (ModelLink(model=model),))

    def finalize_model(self, model: str, status: LoggedModelStatus) -> None:
        self._platform.loggedmodels.finalize(model, status=status)

    def delete_model(self, model: str) -> None:
        self._platform.loggedmodels.delete(model)

    def _listed(self, operation: Any, **options: Any) -> Iterator[Any]:
        after = ""
        while True:
            page: Page[Any] = operation(**options, **self._where, after=after, limit=PAGE)
            yield from page.items
            if page.next is None:
                return
            after = page.next


def _key(new: NewRun | NewModel) -> str:
    """Return the idempotency key under which a copy is made once."""
    return f"import:{hashlib.sha256(f'{new.experiment} {new.mark}'.encode()).hexdigest()}"


Pairs = tuple[dict[str, bool | int | float | str], dict[str, str]]
"""Parameters and tags of one request."""


def split_pairs(params: Mapping[str, str], tags: Mapping[str, str]) -> list[Pairs]:
    """Return parameters and tags in parts that each fit into one request."""
    parts: list[Pairs] = []
    size = BODY_BYTES
    for is_tag, values in ((False, params), (True, tags)):
        for key, value in values.items():
            more = _json_bytes(key) + _json_bytes(value)
            size += more
            if size > BODY_BYTES or len(parts[-1][is_tag]) >= VALUES_PER_CALL:
                parts.append(({}, {}))
                size = more
            parts[-1][is_tag][key] = value
    return parts


def split_values(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [tags for _, tags in split_pairs({}, values)]


def _json_bytes(text: str) -> int:
    """Return how many bytes a text may take in JSON: a control character takes six."""
    return 6 * len(text) + 6
