"""The SQLite file of an MLflow 2 or 3, read without changing it or keeping it locked."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from pydantic import ValidationError

from falaj.errors import Damaged, InvalidInput, Unavailable
from falaj.records.tracking import DatasetInput, RunStatus
from falaj.sdk.run_import.fitting import fit_text, fit_values
from falaj.sdk.run_import.local_files import list_files, read_file
from falaj.sdk.run_import.source import (
    MODEL_STATUSES,
    ModelPoint,
    SourceExperiment,
    SourceFile,
    SourceModel,
    SourceNotes,
    SourceOwner,
    SourcePoint,
    SourceRun,
    from_millis,
    measured,
)

MAGIC = b"SQLite format 3\x00"
NAME_TAG, PARENT_TAG = "mlflow.runName", "mlflow.parentRunId"
DEFAULT_EXPERIMENT = "0"
CHUNK = 200
LOCKED_S = 10.0
VALUE_BYTES = 256 << 20
"""The longest text of a file that is read."""
TABLES = {
    "experiments": {"experiment_id", "name", "lifecycle_stage"},
    "runs": {
        *("run_uuid", "name", "user_id", "status", "start_time", "end_time"),
        *("lifecycle_stage", "artifact_uri", "experiment_id"),
    },
    "metrics": {"key", "value", "timestamp", "run_uuid", "step", "is_nan"},
    "params": {"key", "value", "run_uuid"},
    "tags": {"key", "value", "run_uuid"},
}
"""What MLflow 2 and 3 have in common; other columns and tables are asked for where they are there."""
COPY = "copy it again, as SQLite does it: sqlite3 mlflow.db '.backup copy.db'"
FIX = "an MLflow 2 or 3 wrote it, or: mlflow db upgrade sqlite:///FILE"


class MlflowFile:
    """An MLflow database in a file, and its artifacts in a folder."""

    kind = "mlflow"

    def __init__(self, path: Path, *, artifacts: Path | None = None) -> None:
        """`artifacts` is the root of the artifacts; by default those beside the file are taken, and no others."""
        self.where = str(path)
        self.notes = SourceNotes()
        self._path = path
        self._root = artifacts
        require_whole(path)
        with _readable(path):
            uri = f"file:{quote(str(path.absolute()))}?mode=ro"
            self._database = sqlite3.connect(uri, uri=True, timeout=LOCKED_S, isolation_level=None)
            try:
                self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
                self._database.text_factory = lambda data: data.decode("utf-8", "replace")
                self._database.execute("PRAGMA trusted_schema = OFF")
                self._columns = self._schema()
            except BaseException:
                self._database.close()
                raise

    def close(self) -> None:
        self._database.close()

    def _schema(self) -> dict[str, set[str]]:
        """Return the columns of each table; raise InvalidInput unless they are those of MLflow."""
        tables = [name for (name,) in self._all("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {
            name: {row[1] for row in self._all(f'PRAGMA table_info("{name}")')}
            for name in tables
            if isinstance(name, str) and '"' not in name
        }
        for name, needed in TABLES.items():
            if missing := needed - columns.get(name, set()):
                what = f"no table {name}" if name not in columns else f"no column {name}.{min(missing)}"
                raise InvalidInput.at(
                    self.where, given=what, allowed="the database of an MLflow tracking server", fix=FIX
                )
        return columns

    def _all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return all rows, so that no lock is held while they are worked on."""
        with _readable(self._path):
            return self._database.execute(sql, values).fetchall()

    # ---------------------------------------------------------------------------------------- reading

    def experiments(self) -> list[SourceExperiment]:
        known = self._columns["experiments"]
        made = "creation_time" if "creation_time" in known else "NULL"
        space = "workspace" if "workspace" in known else "NULL"
        tags: dict[Any, dict[str, str]] = {}
        if "experiment_tags" in self._columns:
            for owner, key, value in self._all("SELECT experiment_id, key, value FROM experiment_tags"):
                tags.setdefault(owner, {})[str(key)] = _text(value)
        columns = f"experiment_id, name, lifecycle_stage, {made}, {space}"
        rows = self._all(f"SELECT {columns} FROM experiments ORDER BY experiment_id")  # noqa: S608 - constants
        used = {ident for (ident,) in self._all("SELECT DISTINCT experiment_id FROM runs")}
        return [
            SourceExperiment(
                str(ident),
                qualified(_text(name), _text(workspace)),
                experiment_mark(str(ident), _text(name), created),
                tags.get(ident, {}),
                is_deleted=stage == "deleted",
            )
            for ident, name, stage, created, workspace in rows
            if ident in used or ident in tags or str(ident) != DEFAULT_EXPERIMENT
        ]

    def rows(self, experiments: Sequence[SourceExperiment]) -> int:
        queries = (
            "SELECT count(*) FROM runs WHERE experiment_id = ?",
            "SELECT count(*) FROM metrics WHERE run_uuid IN (SELECT run_uuid FROM runs WHERE experiment_id = ?)",
        )
        found = (self._all(sql, (each.id,)) for each in experiments for sql in queries)
        return sum(count for ((count,),) in found)

    def runs(self, experiment: SourceExperiment) -> Iterator[SourceRun]:
        rows = self._all(
            "SELECT run_uuid, name, status, start_time, end_time, user_id, lifecycle_stage, artifact_uri FROM runs "
            "WHERE experiment_id = ? ORDER BY start_time, run_uuid",
            (experiment.id,),
        )
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            idents = [row[0] for row in chunk]
            params, tags = self._values("params", idents), self._values("tags", idents)
            datasets = self._datasets(idents)
            for ident, name, status, started, ended, user, stage, uri in chunk:
                own = tags.get(ident, {})
                yield SourceRun(
                    id=str(ident),
                    experiment=experiment.id,
                    name=_text(name) or own.get(NAME_TAG, ""),
                    status=run_status(_text(status), self.notes, str(ident)),
                    started_at=from_millis(_whole(started)),
                    ended_at=from_millis(_whole(ended)),
                    user=_text(user),
                    parent=own.get(PARENT_TAG),
                    is_deleted=stage == "deleted",
                    params=params.get(ident, {}),
                    tags={key: value for key, value in own.items() if key not in (NAME_TAG, PARENT_TAG)},
                    datasets=datasets.get(ident, ()),
                    place=_text(uri),
                )

    def _values(self, table: str, runs: Sequence[Any]) -> dict[Any, dict[str, str]]:
        found: dict[Any, dict[str, str]] = {}
        sql = f"SELECT run_uuid, key, value FROM {table} WHERE run_uuid IN ({_marks(runs)})"  # noqa: S608 - constants
        for run, key, value in self._all(sql, runs):
            found.setdefault(run, {})[_text(key)] = _text(value)
        return found

    def _datasets(self, runs: Sequence[Any]) -> dict[Any, list[DatasetInput]]:
        if not {"datasets", "inputs", "input_tags"} <= set(self._columns):
            return {}
        tags: dict[Any, dict[str, str]] = {}
        linked = (
            "FROM inputs i {join} WHERE i.source_type = 'DATASET' AND i.destination_type = 'RUN' "
            f"AND i.destination_id IN ({_marks(runs)})"
        )
        join = "JOIN input_tags t ON t.input_uuid = i.input_uuid"
        for ident, name, value in self._all(
            f"SELECT i.input_uuid, t.name, t.value {linked.format(join=join)}", runs
        ):
            tags.setdefault(ident, {})[_text(name)] = _text(value)
        columns = ", ".join(
            f"d.{name}" for name in ("name", "digest", *(f"dataset_{part}" for part in _DATASET))
        )
        join = "JOIN datasets d ON d.dataset_uuid = i.source_id"
        found: dict[Any, list[DatasetInput]] = {}
        for run, ident, *facts in self._all(
            f"SELECT i.destination_id, i.input_uuid, {columns} {linked.format(join=join)}", runs
        ):
            dataset = dataset_input(
                *(None if fact is None else _text(fact) for fact in facts),
                tags=tags.get(ident, {}),
                notes=self.notes,
                run=str(run),
            )
            found.setdefault(run, []).extend([] if dataset is None else [dataset])
        return found

    def series(self, run: SourceRun) -> dict[str, int]:
        # A '+' keeps the planner from the primary key, which begins with the key and not with the run.
        sql = "SELECT key, count(*) FROM metrics WHERE run_uuid = ? GROUP BY +key"
        return {_text(key): count for key, count in self._all(sql, (run.id,))}

    def points(self, run: SourceRun, keys: Collection[str]) -> Iterator[SourcePoint]:
        sql = (
            "SELECT key, value, step, timestamp, is_nan FROM metrics WHERE run_uuid = ? "
            "ORDER BY +key, +step, +timestamp"
        )
        with _readable(self._path):
            cursor = self._database.execute(sql, (run.id,))
        while True:
            with _readable(self._path):
                rows = cursor.fetchmany(10_000)
            if not rows:
                return
            for key, value, step, timestamp, is_nan in rows:
                name = _text(key)
                if name in keys:
                    yield from self._point(run, name, value, step, timestamp, is_nan)

    def _point(
        self, run: SourceRun, key: str, value: Any, step: Any, timestamp: Any, is_nan: Any
    ) -> Iterator[SourcePoint]:
        at, number = from_millis(_whole(timestamp)), _whole(step)
        if at is None or number is None or not isinstance(value, int | float | None):
            self.notes.add("points without a number, a whole step or a date", f"{run.id} {key}")
            return
        is_number = not is_nan and value is not None
        yield SourcePoint(key, measured(float(value or 0.0)) if is_number else float("nan"), number, at)

    def models(self, experiment: SourceExperiment) -> Iterator[SourceModel]:
        if "logged_models" not in self._columns:  # before MLflow 3
            return
        for ident, name, place, status, stage, kind, run in self._all(
            "SELECT model_id, name, artifact_location, status, lifecycle_stage, model_type, source_run_id "
            "FROM logged_models WHERE experiment_id = ? ORDER BY creation_timestamp_ms, model_id",
            (experiment.id,),
        ):
            yield SourceModel(
                id=_text(ident),
                experiment=experiment.id,
                name=_text(name),
                type=_text(kind),
                status=MODEL_STATUSES.get(status, "failed"),
                run=_text(run) or None,
                is_deleted=stage == "deleted",
                params=self._model_values("SELECT param_key, param_value FROM logged_model_params", ident),
                tags=self._model_values("SELECT tag_key, tag_value FROM logged_model_tags", ident),
                points=list(self._model_points(ident)),
                place=_text(place),
            )

    def _model_values(self, select: str, model: Any) -> dict[str, str]:
        rows = self._all(f"{select} WHERE model_id = ?", (model,))
        return {_text(key): _text(value) for key, value in rows}

    def _model_points(self, model: Any) -> Iterator[ModelPoint]:
        sql = (
            "SELECT run_id, metric_name, metric_value, metric_step, metric_timestamp_ms, dataset_name, dataset_digest "
            "FROM logged_model_metrics WHERE model_id = ?"
        )
        for run, key, value, step, timestamp, dataset, digest in self._all(sql, (model,)):
            at, number = from_millis(_whole(timestamp)), _whole(step)
            if at is not None and number is not None and isinstance(value, int | float | None):
                measure = float("nan") if value is None else measured(float(value))
                point = SourcePoint(_text(key), measure, number, at)
                yield ModelPoint(_text(run), point, _text(dataset) or None, _text(digest) or None)

    # -------------------------------------------------------------------------------------- artifacts

    def files(self, owner: SourceOwner) -> list[SourceFile]:
        folder = self._folder(owner)
        return [] if folder is None else list_files(folder, self.notes)

    def read(self, owner: SourceOwner, path: str) -> Iterator[bytes]:
        folder = self._folder(owner)
        return iter(()) if folder is None else read_file(folder, path)

    def _folder(self, owner: SourceOwner) -> Path | None:
        """Return the folder of the artifacts of a run or a model, or None if it has none here.

        The address is a stranger's word, and could name any folder of this machine: only what is below the root that
        the user named, or below the folder of the database, is read.
        """
        uri = urlsplit(owner.place)
        parts = [part for part in unquote(uri.path).split("/") if part not in ("", ".")]
        if not parts or ".." in parts:
            return None
        if self._root is not None:
            ends = (parts[-4:], parts[-3:], parts[-2:], [owner.id])
            return _first_below(self._root, [self._root.joinpath(*end) for end in ends])
        beside = self._path.absolute().parent
        if uri.scheme in ("", "file"):
            named = Path("/", *parts) if owner.place.startswith(("/", "file:/")) else beside.joinpath(*parts)
            if named.is_dir() and not named.resolve().is_relative_to(beside.resolve()):
                self.notes.add("artifacts that are not beside the database; name their root", str(named))
            return _first_below(beside, [named])
        served = [beside.joinpath("mlartifacts", *parts)] if uri.scheme == "mlflow-artifacts" else []
        if (found := _first_below(beside, served)) is not None:
            return found
        self.notes.add("artifacts elsewhere; name the root of a local copy", owner.place)
        return None


_DATASET = ("source_type", "source", "schema", "profile")


def qualified(name: str, workspace: str) -> str:
    """Return the name of an experiment; that of another workspace than MLflow's default one begins with it."""
    return name if workspace in ("", "default") else f"{workspace}/{name}"


def experiment_mark(ident: str, name: str, created: Any) -> str:
    """Return what tells an experiment from all others: ids begin at 0 in every MLflow."""
    return f"mlflow:{ident}@{created if created else fit_text(name)}"


def run_status(text: str, notes: SourceNotes, run: str) -> RunStatus:
    try:
        return RunStatus(text.lower())
    except ValueError:
        notes.add("runs of an unknown status, which count as failed", run)
        return RunStatus.FAILED


def dataset_input(
    name: str | None,
    digest: str | None,
    source_type: str | None,
    source: str | None,
    schema: str | None,
    profile: str | None,
    *,
    tags: Mapping[str, str],
    notes: SourceNotes,
    run: str,
) -> DatasetInput | None:
    """Return a dataset of a run; one that is no dataset here is noted."""
    try:
        return DatasetInput(
            name=name or "",
            digest=digest or "",
            source_type=source_type or "local",
            source=source or "",
            schema_text=schema,
            profile=profile,
            tags=fit_values(tags).values,
        )
    except ValidationError:
        notes.add("datasets whose name, digest or texts are too long", run)
        return None


def require_whole(path: Path) -> None:
    """Raise InvalidInput unless a file is a SQLite database that has as many pages as it says."""
    try:
        with path.open("rb") as file:
            head = file.read(100)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InvalidInput.at(str(path), given=error.strerror, allowed="a file that can be read") from None
    if not head.startswith(MAGIC) or len(head) < 100:
        raise InvalidInput.at(
            str(path), given="no SQLite database", allowed="the SQLite file of MLflow, such as mlflow.db"
        )
    page = int.from_bytes(head[16:18], "big")
    pages = int.from_bytes(head[28:32], "big")
    if head[24:28] == head[92:96] and pages * (65536 if page == 1 else page) > size:
        raise InvalidInput.at(
            str(path),
            given=f"{size} bytes of a database of {pages} pages",
            allowed="a whole database",
            fix=COPY,
        )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into errors that say what to do."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise Unavailable(
                f"{path} is locked by another process; stop what writes to it, or copy it: "
                f"sqlite3 {path.name} '.backup copy.db'"
            ) from None
        raise _unreadable(path, error) from None
    except sqlite3.Error as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: sqlite3.Error) -> Damaged:
    return Damaged.at(str(path), given=str(error), allowed="a whole database that SQLite can read", fix=COPY)


def _first_below(root: Path, candidates: Sequence[Path]) -> Path | None:
    """Return the first folder that is there and, links followed, below `root`."""
    top = root.resolve()
    for each in candidates:
        if each.is_dir() and (found := each.resolve()).is_relative_to(top):
            return found
    return None


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _text(value: Any) -> str:
    """Return what a column holds as text: SQLite keeps values of any type in any column."""
    return (
        "" if value is None else value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None
