"""Runs of other trackers in files: SQLite databases as MLflow makes them, and exports of W&B."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTED = 1_790_000_000_000
SCHEMA = """
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO alembic_version VALUES ('{revision}');
CREATE TABLE experiments (
    experiment_id INTEGER NOT NULL PRIMARY KEY, name VARCHAR(256) NOT NULL, artifact_location VARCHAR(256),
    lifecycle_stage VARCHAR(32), creation_time BIGINT, last_update_time BIGINT{workspace});
CREATE TABLE experiment_tags (
    key VARCHAR(250) NOT NULL, value TEXT, experiment_id INTEGER NOT NULL, PRIMARY KEY (key, experiment_id));
CREATE TABLE runs (
    run_uuid VARCHAR(32) NOT NULL PRIMARY KEY, name VARCHAR(250), source_type VARCHAR(20), source_name VARCHAR(500),
    entry_point_name VARCHAR(50), user_id VARCHAR(256), status VARCHAR(9), start_time BIGINT, end_time BIGINT,
    source_version VARCHAR(50), lifecycle_stage VARCHAR(20), artifact_uri VARCHAR(200), experiment_id INTEGER,
    deleted_time BIGINT);
CREATE TABLE metrics (
    key VARCHAR(250) NOT NULL, value FLOAT NOT NULL, timestamp BIGINT NOT NULL, run_uuid VARCHAR(32) NOT NULL,
    step BIGINT DEFAULT '0' NOT NULL, is_nan BOOLEAN DEFAULT '0' NOT NULL,
    PRIMARY KEY (key, timestamp, step, run_uuid, value, is_nan));
CREATE INDEX index_metrics_run_uuid ON metrics (run_uuid);
CREATE TABLE params (
    key VARCHAR(250) NOT NULL, value VARCHAR(8000) NOT NULL, run_uuid VARCHAR(32) NOT NULL,
    PRIMARY KEY (key, run_uuid));
CREATE INDEX index_params_run_uuid ON params (run_uuid);
CREATE TABLE tags (
    key VARCHAR(250) NOT NULL, value VARCHAR(8000), run_uuid VARCHAR(32) NOT NULL, PRIMARY KEY (key, run_uuid));
CREATE INDEX index_tags_run_uuid ON tags (run_uuid);
CREATE TABLE datasets (
    dataset_uuid VARCHAR(36) NOT NULL, experiment_id INTEGER NOT NULL, name VARCHAR(500) NOT NULL,
    digest VARCHAR(36) NOT NULL, dataset_source_type VARCHAR(36) NOT NULL, dataset_source TEXT NOT NULL,
    dataset_schema TEXT, dataset_profile TEXT, PRIMARY KEY (experiment_id, name, digest));
CREATE TABLE inputs (
    input_uuid VARCHAR(36) NOT NULL, source_type VARCHAR(36) NOT NULL, source_id VARCHAR(36) NOT NULL,
    destination_type VARCHAR(36) NOT NULL, destination_id VARCHAR(36) NOT NULL,
    PRIMARY KEY (source_type, source_id, destination_type, destination_id));
CREATE TABLE input_tags (
    input_uuid VARCHAR(36) NOT NULL, name VARCHAR(255) NOT NULL, value VARCHAR(500) NOT NULL,
    PRIMARY KEY (input_uuid, name));
"""
"""The tables of runs as MLflow 2.22 and 3.17 make them; foreign keys and checks do not matter to a reader."""
MODELS = """
CREATE TABLE logged_models (
    model_id VARCHAR(36) NOT NULL PRIMARY KEY, experiment_id INTEGER NOT NULL, name VARCHAR(500) NOT NULL,
    artifact_location VARCHAR(1000) NOT NULL, creation_timestamp_ms BIGINT NOT NULL,
    last_updated_timestamp_ms BIGINT NOT NULL, status INTEGER NOT NULL, lifecycle_stage VARCHAR(32),
    model_type VARCHAR(500), source_run_id VARCHAR(32), status_message VARCHAR(1000));
CREATE TABLE logged_model_metrics (
    model_id VARCHAR(36) NOT NULL, metric_name VARCHAR(500) NOT NULL, metric_timestamp_ms BIGINT NOT NULL,
    metric_step BIGINT NOT NULL, metric_value FLOAT, experiment_id INTEGER NOT NULL, run_id VARCHAR(32) NOT NULL,
    dataset_uuid VARCHAR(36), dataset_name VARCHAR(500), dataset_digest VARCHAR(36));
CREATE TABLE logged_model_params (
    model_id VARCHAR(36) NOT NULL, experiment_id INTEGER NOT NULL, param_key VARCHAR(255) NOT NULL,
    param_value TEXT NOT NULL, PRIMARY KEY (model_id, param_key));
CREATE TABLE logged_model_tags (
    model_id VARCHAR(36) NOT NULL, experiment_id INTEGER NOT NULL, tag_key VARCHAR(255) NOT NULL,
    tag_value TEXT NOT NULL, PRIMARY KEY (model_id, tag_key));
"""
"""Further tables of MLflow 3."""
WORKSPACE = ", workspace VARCHAR(63) DEFAULT 'default' NOT NULL"


@dataclass(frozen=True)
class MlflowFixture:
    """An MLflow database in `folder`, with its artifacts beside it."""

    folder: Path
    version: int = 3

    @property
    def path(self) -> Path:
        return self.folder / "mlflow.db"

    def create(self) -> MlflowFixture:
        self.folder.mkdir(parents=True, exist_ok=True)
        workspace, revision = (WORKSPACE, "dc11669786a5") if self.version == 3 else ("", "6953534de441")
        with sqlite3.connect(self.path) as database:
            database.executescript(SCHEMA.format(workspace=workspace, revision=revision))
            database.executescript(MODELS if self.version == 3 else "")
        database.close()
        self.experiment(0, "Default")
        return self

    def sql(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        with sqlite3.connect(self.path) as database:
            database.executemany(statement, rows)
        database.close()

    def experiment(
        self, ident: int, name: str, *, stage: str = "active", tags: Mapping[str, str] | None = None
    ) -> None:
        row = (ident, name, f"mlruns/{ident}", stage, STARTED + ident, STARTED + ident)
        columns = "experiment_id, name, artifact_location, lifecycle_stage, creation_time, last_update_time"
        self.sql(f"INSERT INTO experiments ({columns}) VALUES (?, ?, ?, ?, ?, ?)", [row])
        pairs = [(key, value, ident) for key, value in (tags or {}).items()]
        self.sql("INSERT INTO experiment_tags VALUES (?, ?, ?)", pairs)

    def run(
        self,
        ident: str,
        *,
        experiment: int = 1,
        name: str = "",
        status: str = "FINISHED",
        stage: str = "active",
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        points: Iterable[tuple[str, float, int, int]] = (),
        files: Mapping[str, bytes] | None = None,
        uri: str | None = None,
    ) -> None:
        """Add a run; a point is key, value, step and milliseconds since its start, and NaN is kept as MLflow does."""
        folder = self.folder / "mlruns" / str(experiment) / ident / "artifacts"
        facts = (ident, name or ident, "LOCAL", "", "", "ada", status, STARTED, STARTED + 60_000, "", stage)
        self.sql(
            f"INSERT INTO runs VALUES ({', '.join('?' * 14)})",
            [(*facts, uri if uri is not None else str(folder), experiment, None)],
        )
        self.sql(
            "INSERT INTO params VALUES (?, ?, ?)",
            [(key, value, ident) for key, value in (params or {}).items()],
        )
        self.sql(
            "INSERT INTO tags VALUES (?, ?, ?)", [(key, value, ident) for key, value in (tags or {}).items()]
        )
        self.points(ident, points)
        for path, data in (files or {}).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

    def points(self, run: str, points: Iterable[tuple[str, float, int, int]]) -> None:
        rows = (
            (key, 0.0 if value != value else value, STARTED + after, run, step, int(value != value))
            for key, value, step, after in points
        )
        self.sql("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)

    def dataset(
        self, run: str, *, experiment: int = 1, name: str = "trips", context: str = "training"
    ) -> None:
        self.sql(
            "INSERT OR IGNORE INTO datasets VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(f"d-{name}", experiment, name, "93a700eb", "local", "{}", '{"a": 1}', None)],
        )
        self.sql(
            "INSERT INTO inputs VALUES (?, ?, ?, ?, ?)",
            [(f"i-{run}-{name}", "DATASET", f"d-{name}", "RUN", run)],
        )
        self.sql(
            "INSERT INTO input_tags VALUES (?, ?, ?)", [(f"i-{run}-{name}", "mlflow.data.context", context)]
        )

    def model(
        self, ident: str, *, run: str, experiment: int = 1, stage: str = "active", files: Mapping[str, bytes]
    ) -> None:
        """Add a logged model with a parameter, a tag and two metrics of its run on the dataset trips.

        MLflow keeps the NaN of a model as 0; so is the second one.
        """
        folder = self.folder / "mlruns" / str(experiment) / "models" / ident / "artifacts"
        facts = (
            ident,
            experiment,
            f"{ident} model",
            str(folder),
            STARTED,
            STARTED,
            2,
            stage,
            "agent",
            run,
            None,
        )
        self.sql(f"INSERT INTO logged_models VALUES ({', '.join('?' * 11)})", [facts])
        self.sql("INSERT INTO logged_model_params VALUES (?, ?, ?, ?)", [(ident, experiment, "depth", "3")])
        self.sql("INSERT INTO logged_model_tags VALUES (?, ?, ?, ?)", [(ident, experiment, "team", "risk")])
        where = (experiment, run, "d-trips", "trips", "93a700eb")
        measured = [
            (ident, key, STARTED + 2, 1, value, *where) for key, value in (("auc", 0.9), ("loss", 0.0))
        ]
        self.sql(f"INSERT INTO logged_model_metrics VALUES ({', '.join('?' * 10)})", measured)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)


def many_runs(folder: Path, *, runs: int, points: int) -> MlflowFixture:
    """Return a database of so many runs in one experiment, each with so many points of ten metrics."""
    made = MlflowFixture(folder).create()
    made.experiment(1, "many")
    idents = [f"{number:032x}" for number in range(runs)]
    made.sql(
        f"INSERT INTO runs VALUES ({', '.join('?' * 14)})",
        (
            (
                ident,
                ident,
                "LOCAL",
                "",
                "",
                "ada",
                "FINISHED",
                STARTED + at,
                STARTED + at + 1,
                "",
                "active",
                "",
                1,
                None,
            )
            for at, ident in enumerate(idents)
        ),
    )
    for table, count in (("params", 5), ("tags", 3)):
        made.sql(
            f"INSERT INTO {table} VALUES (?, ?, ?)",
            ((f"{table}-{number}", str(number), ident) for ident in idents for number in range(count)),
        )
    made.sql(
        "INSERT INTO metrics VALUES (?, ?, ?, ?, ?, 0)",
        (
            (f"metric-{number % 10}", number * 0.5, STARTED + number, ident, number // 10)
            for ident in idents
            for number in range(points)
        ),
    )
    return made


def wandb_run(ident: str, *, rows: Iterable[Mapping[str, Any]] = (), **fields: Any) -> list[str]:
    """Return the lines of a run in an export."""
    facts = {
        "id": ident,
        "project": "cleanrl",
        "name": ident,
        "state": "finished",
        "created_at": "2026-05-03T12:00:00",
    }
    lines = [json.dumps({"wandb_run": {**facts, **fields}}), *(json.dumps(row) for row in rows)]
    return [*lines, json.dumps({"wandb_end": ident, "rows": len(lines) - 1})]


def wandb_file(path: Path, *runs: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for run in runs for line in run))
    return path
