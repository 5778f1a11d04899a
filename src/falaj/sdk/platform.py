"""What `fj.open` and `fj.connect` both give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from falaj.control.services import Services
from falaj.records.control.pipelines import StoredPipeline
from falaj.records.features import ApplyResult, IngestResult, TrainingSet
from falaj.records.governance.audit import LogCheck
from falaj.records.governance.blobs import Blob
from falaj.records.registry import ModelVersion
from falaj.records.training.jobs import Job

CHUNK_BYTES = 1 << 20


class Platform(Services):
    """Every room under its name, near or far. Use it as a context manager, or close it."""

    def __init__(self, services: Services, *, where: str, on_close: Callable[[], None]) -> None:
        super().__init__(**vars(services))
        self.where = where
        self._on_close = on_close

    def put(self, name: str, data: bytes | Path | IO[bytes] | Iterable[bytes], **where: Any) -> Blob:
        """Upload `data` and commit it under `name`: blobs.upload and blobs.commit in one."""
        staged = self.blobs.upload(chunks(data), **where)
        return self.blobs.commit(staged.id, name=name)

    def get(self, blob: str) -> bytes:
        """All the bytes of a blob."""
        return b"".join(self.blobs.read(blob))

    def apply(self, what: Any, **where: Any) -> ApplyResult:
        """Bring entities and views to the definitions in a file or folder, or to these records."""
        from falaj.sdk import features

        return features.apply(self, what, **where)

    def ingest(self, view: str, rows: Any, **where: Any) -> IngestResult:
        """Upload a file (Parquet, CSV or Arrow) or a table, and add its rows to a view."""
        from falaj.sdk import features

        return features.ingest(self, view, rows, **where)

    def training_set(self, name: str, *, spine: Any, views: Sequence[str], **options: Any) -> TrainingSet:
        """Join a file, a table or a view with the features of `views`; `options` as of features.training_set."""
        from falaj.sdk import features

        return features.training_set(self, name, spine=spine, views=views, **options)

    def train(
        self, script: str | Path | None = None, *, file: str | Path | None = None, **options: Any
    ) -> Job:
        """Submit a script with the code around it as a job, or the one in a file of YAML.

        `options` are named as those of `falaj train`: args, inputs, queue, gpus, memory="8GiB", timeout="2h" …; with
        estimate=True it is refused if its training would not fit in memory.
        """
        from falaj.sdk import training

        return training.train(self, script, file=file, **options)

    def pipeline(self, script: str | Path, **fields: Any) -> StoredPipeline:
        """Apply the pipeline that trains by `script`, with the code around it; `fields` are those of Pipeline."""
        from falaj.sdk.pipelines import apply_pipeline

        return apply_pipeline(self, script, **fields)

    def register(self, job: str, model: str, **where: Any) -> ModelVersion:
        """Make the model that a job left behind the next version of `model`."""
        from falaj.control.jobs.models import register_model

        return register_model(self, self.jobs.show(job), model, **where)

    def verify_audit(self) -> LogCheck:
        """The verdict on the audit log: the last word of audit.verify."""
        *_, verdict = self.audit.verify()
        return verdict

    def close(self) -> None:
        self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Falaj platform at {self.where}>"


def chunks(data: bytes | Path | IO[bytes] | Iterable[bytes]) -> Iterator[bytes]:
    """`data` in pieces, whatever it is."""
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
