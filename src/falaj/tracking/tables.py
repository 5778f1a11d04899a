"""The tables of tracking."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
)

from falaj.governance.tables import object_key
from falaj.ports.metadata import METADATA, UNRECORDED, JsonText, UtcTime


def _owner_key() -> Column[str]:
    """Return the part of a key that names the run, the logged model or the experiment that a row belongs to."""
    return Column("run", Text, ForeignKey("governance_objects.id"), primary_key=True)


experiments = Table(  # one that was made before there was this table has a row once it changes
    "tracking_experiments",
    METADATA,
    object_key(),
    Column("updated_at", UtcTime, nullable=False),
    Column("deleted_at", UtcTime),
)

runs = Table(
    "tracking_runs",
    METADATA,
    object_key(),
    Column("experiment", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("ended_at", UtcTime),
    Column("parent", Text),
    Column("user", Text),
    Column("started_at", UtcTime, nullable=False),
    Column("deleted_at", UtcTime),
    Column("sealed", Boolean),  # the run of a job that has ended takes nothing any more
    Index("tracking_runs_experiment", "experiment", "id"),
    Index("tracking_runs_parent", "parent"),
    Index("tracking_runs_deleted", "deleted_at"),
)

params = Table(
    "tracking_params",
    METADATA,
    _owner_key(),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

tags = Table(
    "tracking_tags",
    METADATA,
    _owner_key(),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

series = Table(  # one metric of one run, and its summary; `last`, `low` and `high` are null for NaN
    "tracking_series",
    METADATA,
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True),
    Column("run", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("key", Text, nullable=False),
    Column("points", BigInteger, nullable=False),
    Column("last", Double),
    Column("last_step", BigInteger, nullable=False),
    Column("last_at", BigInteger, nullable=False),
    Column("low", Double),
    Column("high", Double),
    Column("blocks", BigInteger, nullable=False, server_default="0"),  # the number of the next block
    Column("open_from", BigInteger, nullable=False, server_default="0"),  # from here on blocks are merged
    Column("open_points", BigInteger, nullable=False, server_default="0"),  # in those
    Index("tracking_series_key", "run", "key", unique=True),
    Index("tracking_series_last", "key", "last", "run"),
    info=UNRECORDED,
)

blocks = Table(  # points of a series, packed and sorted; no foreign key: it would be checked for every block
    "tracking_blocks",
    METADATA,
    Column("series", BigInteger, primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("first_step", BigInteger, nullable=False),
    Column("first_at", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("last_at", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    info=UNRECORDED,
)

batches = Table(
    "tracking_batches",
    METADATA,
    _owner_key(),
    Column("batch", Text, primary_key=True),
    Column("digest", Text, nullable=False),
    Column("stored", BigInteger, nullable=False),
    Column("repeated", BigInteger, nullable=False),
    info=UNRECORDED,
)

artifacts = Table(
    "tracking_artifacts",
    METADATA,
    _owner_key(),
    Column("path", Text, primary_key=True),
    Column("blob", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("attached_at", UtcTime, nullable=False),
    Column("unsafe", Boolean),  # its first bytes are those of a pickle; null: they were not looked at
)

uploads = Table(  # files of runs and logged models that arrive in parts
    "tracking_uploads",
    METADATA,
    object_key(),
    Column("owner", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("path", Text, nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Index("tracking_uploads_started", "started_at"),
)

upload_parts = Table(
    "tracking_upload_parts",
    METADATA,
    Column("upload", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("blob", Text, ForeignKey("governance_objects.id"), nullable=False),
)

datasets = Table(
    "tracking_datasets",
    METADATA,
    Column("experiment", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("digest", Text, primary_key=True),
    Column("source_type", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("schema_text", Text),
    Column("profile", Text),
)

inputs = Table(  # a dataset that a run used
    "tracking_inputs",
    METADATA,
    _owner_key(),
    Column("name", Text, primary_key=True),
    Column("digest", Text, primary_key=True),
    Column("context", Text),
    Column("tags", JsonText, nullable=False),
)

models = Table(
    "tracking_models",
    METADATA,
    object_key(),
    Column("experiment", Text, ForeignKey("governance_objects.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("source_run", Text, ForeignKey("governance_objects.id")),
    Column("updated_at", UtcTime, nullable=False),
    Column("deleted_at", UtcTime),
    Index("tracking_models_experiment", "experiment", "id"),
    Index("tracking_models_run", "source_run"),
)

model_links = Table(  # a logged model that a run read or made
    "tracking_model_links",
    METADATA,
    _owner_key(),
    Column("model", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("role", Text, primary_key=True),
    Column("step", BigInteger, nullable=False),
    Index("tracking_model_links_model", "model"),
)

model_metrics = Table(  # the newest value; `value` is null for NaN, and a dataset that is not known is empty
    "tracking_model_metrics",
    METADATA,
    Column("model", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("key", Text, primary_key=True),
    Column("run", Text, ForeignKey("governance_objects.id"), primary_key=True),
    Column("dataset", Text, primary_key=True),
    Column("dataset_digest", Text, primary_key=True),
    Column("step", BigInteger, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("value", Double),
    Index("tracking_model_metrics_run", "run"),
    info=UNRECORDED,
)
