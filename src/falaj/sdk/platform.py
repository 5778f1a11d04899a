"""The platform as `fj.open` and `fj.connect` return it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from falaj.control.services import Services
from falaj.records.control.pipelines import StoredPipeline
from falaj.records.control.predictions import PredictionColumns
from falaj.records.control.workflows import WorkflowRun
from falaj.records.features import ApplyResult, IngestResult, TrainingSet
from falaj.records.governance.audit import LogCheck
from falaj.records.governance.blobs import Blob
from falaj.records.record import html_table
from falaj.records.registry import ModelExport, ModelVersion
from falaj.records.training.jobs import Job
from falaj.records.tuning import Study

if TYPE_CHECKING:
    from falaj.sdk.run_import.report import ImportReport
    from falaj.sdk.runs import ActiveRun

CHUNK_BYTES = 1 << 20


class Platform(Services):
    """Every service under its name, local or remote. Use it as a context manager, or close it."""

    def __init__(self, services: Services, *, where: str, on_close: Callable[[], None]) -> None:
        super().__init__(**vars(services))
        self.where = where
        self._on_close = on_close

    def put(self, name: str, data: bytes | Path | IO[bytes] | Iterable[bytes], **where: Any) -> Blob:
        """Upload `data` and commit it as the blob `name`."""
        staged = self.blobs.upload(chunks(data), **where)
        return self.blobs.commit(staged.id, name=name)

    def get(self, blob: str) -> bytes:
        """Return all the bytes of a blob."""
        return b"".join(self.blobs.read(blob))

    def apply(self, what: Any, **where: Any) -> ApplyResult:
        """Apply the definitions of entities and views in a file or folder, or these records."""
        from falaj.sdk import features

        return features.apply(self, what, **where)

    def ingest(
        self,
        view: str,
        rows: Any,
        *,
        strict: bool = False,
        again: bool = False,
        backfill: bool = False,
        **where: Any,
    ) -> IngestResult:
        """Upload a file (Parquet, CSV or Arrow) or a table, and add its rows to a view, unless they were added before.

        `again` adds them in any case. `strict` refuses rows that do not say themselves how they are to be read. Rows
        of a `backfill` count as known when they happened, not when they come in.
        """
        from falaj.sdk import features

        return features.ingest(self, view, rows, strict=strict, again=again, backfill=backfill, **where)

    def training_set(self, name: str, *, spine: Any, views: Sequence[str], **options: Any) -> TrainingSet:
        """Join a file, a table or a view with the features of `views`; `options` are those of features.training_set."""
        from falaj.sdk import features

        return features.training_set(self, name, spine=spine, views=views, **options)

    def train(
        self, script: str | Path | None = None, *, file: str | Path | None = None, **options: Any
    ) -> Job:
        """Submit a script with the code in its folder as a job, or the job in a YAML file.

        `options` are named as those of `falaj train`: args, inputs, queue, gpus, memory="8GiB", timeout="2h" …; with
        estimate=True a job is refused if its training would not fit in memory.
        """
        from falaj.sdk import training

        return training.train(self, script, file=file, **options)

    def tune(
        self,
        script: str | Path,
        *,
        space: str | Path | Mapping[str, Any],
        metric: str | Sequence[str],
        **options: Any,
    ) -> Study:
        """Search for hyperparameters: trials are jobs that run `script` with values of `space` as options.

        `space` is a TOML file or a dict: {"lr": {"low": 1e-5, "high": 0.1, "log": True}, "optimizer": ["adam", "sgd"]}.
        `options` are named as those of `falaj tune`: trials, parallel, sampler, pruner, direction, name, register …,
        and those of `train`. Follow the study with `platform.studies.watch(study.id)`.
        """
        from falaj.sdk import tuning

        return tuning.tune(self, script, space=space, metric=metric, **options)

    def predict(
        self,
        model: str,
        rows: Any,
        name: str,
        *,
        columns: PredictionColumns = PredictionColumns(),  # noqa: B008 - frozen
        **options: Any,
    ) -> WorkflowRun:
        """Predict the rows of a Parquet file, of a table, or of view:NAME, dataset:NAME or blob:NAME, as a job.

        The predictions become the blob `name`. `options` are those of predictions.start: into, device, cpus, gpus,
        retries, queue.
        """
        from falaj.sdk import features

        reference = features.spine_reference(rows)
        if reference is None:
            home = self.models.version(model).workspace
            reference = self.blobs.upload(features.pieces(rows), workspace=home).id
        return self.predictions.start(model, data=reference, name=name, columns=columns, **options)

    def pipeline(self, script: str | Path, **fields: Any) -> StoredPipeline:
        """Apply a pipeline that trains with `script` and the code in its folder; `fields` are those of Pipeline."""
        from falaj.sdk.pipelines import apply_pipeline

        return apply_pipeline(self, script, **fields)

    def register(self, job: str, model: str, **where: Any) -> ModelVersion:
        """Register the model that a job saved as the next version of `model`."""
        from falaj.control.jobs.models import register_model

        return register_model(self, self.jobs.show(job), model, **where)

    def export(
        self, model: str, folder: str | Path, *, to: str, force: bool = False, **options: Any
    ) -> ModelExport:
        """Write a model version to a folder, whole or not at all: to="triton", to="kserve", or as a bundle to="edge".

        `force` replaces an earlier export there. `options` are those of models.export; with archive="FILE.tar.gz" an
        archive is written as well.
        """
        from falaj.sdk.model_exports import export_model

        return export_model(self, model, Path(folder), to=to, force=force, **options)

    def run(
        self,
        experiment: str,
        *,
        name: str | None = None,
        system_metrics_every: timedelta | None = None,
        **options: Any,
    ) -> ActiveRun:
        """Start a run of an experiment for a `with` block: `with platform.run("churn") as run: run.log(auc=0.9)`.

        `options` are those of runs.start: params, tags, parent, sources, workspace. With `system_metrics_every` the
        run also logs the CPU, memory, disk, network and GPUs of this machine so often.
        """
        from falaj.sdk.runs import ActiveRun

        started = self.runs.start(experiment, name=name, **options)
        return ActiveRun(self, started, system_metrics_every=system_metrics_every)

    def import_runs(
        self,
        source: str | Path,
        *,
        kind: Literal["mlflow", "wandb"] | None = None,
        experiments: Sequence[str] = (),
        artifacts: str | Path | None = None,
        workspace: str | None = None,
        **options: Any,
    ) -> ImportReport:
        """Copy the runs of an MLflow server (its address), of its SQLite file, or of a W&B export (JSON lines).

        It is read in this process, and can be repeated: only what is missing is sent. `artifacts` is the folder of the
        artifacts, where those are not beside the file. `options` are those of ImportOptions: prefix, merge, with_files.
        """
        from falaj.sdk.run_import.sources import import_runs

        return import_runs(
            self,
            source,
            kind=kind,
            experiments=experiments,
            artifacts=None if artifacts is None else Path(artifacts),
            workspace=workspace,
            **options,
        )

    def verify_audit(self, *, deep: bool = False) -> LogCheck:
        """Verify the audit log; `deep`: the stores against it, too. Return the result."""
        *_, verdict = self.audit.verify(deep=deep)
        return verdict

    def close(self) -> None:
        """Close the platform or the connection."""
        self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Falaj platform at {self.where}>"

    def _repr_html_(self) -> str:
        """Return the place and the services as HTML, for notebooks."""
        services = sorted(name for name in vars(self) if not name.startswith("_") and name != "where")
        lines = [(", ".join(services[at : at + 8]),) for at in range(0, len(services), 8)]
        return html_table(f"Falaj platform at {self.where}", ("services",), lines)


def chunks(data: bytes | Path | IO[bytes] | Iterable[bytes]) -> Iterator[bytes]:
    """Yield `data` in chunks."""
    if isinstance(data, bytes):
        yield from (data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES))
    elif isinstance(data, Path):
        with data.open("rb") as file:
            yield from chunks(file)
    elif hasattr(data, "read"):
        while piece := data.read(CHUNK_BYTES):
            yield piece
    else:
        yield from data
