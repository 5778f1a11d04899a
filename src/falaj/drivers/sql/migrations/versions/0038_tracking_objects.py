"""Experiments, datasets and logged models of tracking, deleted runs, and points packed in blocks."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"

BLOCK_POINTS = 8192
NAN = float("nan")


def upgrade() -> None:
    _experiments_and_runs()
    _datasets()
    _models()
    _blocks()


def _owner() -> sa.Column[str]:
    return sa.Column("run", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True)


def _object(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=nullable)


def _experiments_and_runs() -> None:
    op.create_table(
        "tracking_experiments",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger()),
    )
    for name, kind in (
        ("parent", sa.Text()),
        ("user", sa.Text()),
        ("started_at", sa.BigInteger()),
        ("deleted_at", sa.BigInteger()),
        ("sealed", sa.Boolean()),
    ):
        op.add_column("tracking_runs", sa.Column(name, kind))
    op.create_index("tracking_runs_parent", "tracking_runs", ["parent"])
    op.create_index("tracking_runs_deleted", "tracking_runs", ["deleted_at"])


def _datasets() -> None:
    op.create_table(
        "tracking_datasets",
        sa.Column("experiment", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("digest", sa.Text(), primary_key=True),
        sa.Column("source_type", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("schema_text", sa.Text()),
        sa.Column("profile", sa.Text()),
    )
    op.create_table(
        "tracking_inputs",
        _owner(),
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("digest", sa.Text(), primary_key=True),
        sa.Column("context", sa.Text()),
        sa.Column("tags", sa.Text(), nullable=False),
    )


def _models() -> None:
    op.create_table(
        "tracking_models",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        _object("experiment"),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        _object("source_run", nullable=True),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", sa.BigInteger()),
    )
    op.create_index("tracking_models_experiment", "tracking_models", ["experiment", "id"])
    op.create_index("tracking_models_run", "tracking_models", ["source_run"])
    op.create_table(
        "tracking_model_links",
        _owner(),
        sa.Column("model", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("role", sa.Text(), primary_key=True),
        sa.Column("step", sa.BigInteger(), nullable=False),
    )
    op.create_index("tracking_model_links_model", "tracking_model_links", ["model"])
    op.create_table(
        "tracking_model_metrics",
        sa.Column("model", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("key", sa.Text(), primary_key=True),
        _owner(),
        sa.Column("dataset", sa.Text(), primary_key=True),
        sa.Column("dataset_digest", sa.Text(), primary_key=True),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Double()),
    )
    op.create_index("tracking_model_metrics_run", "tracking_model_metrics", ["run"])


# ---------------------------------------------------------------------------------------------- blocks


def _blocks() -> None:
    op.create_table(
        "tracking_blocks",
        sa.Column("series", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("first_at", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("last_at", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )
    for name in ("blocks", "open_from", "open_points"):
        op.add_column("tracking_series", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    _pack_points()
    op.create_index("tracking_series_last", "tracking_series", ["key", "last", "run"])
    op.drop_table("tracking_points")


def _pack_points() -> None:
    """Move the points of every series into blocks, in their order."""
    bind = op.get_bind()
    insert = sa.text(
        "INSERT INTO tracking_blocks (series, number, first_step, first_at, last_step, last_at, data)"
        " VALUES (:series, :number, :first_step, :first_at, :last_step, :last_at, :data)"
    )
    count = sa.text("UPDATE tracking_series SET blocks = :count, open_from = :count WHERE id = :series")
    query = sa.text(
        "SELECT series, step, at, value, is_nan FROM tracking_points ORDER BY series, step, at, value, is_nan"
    )
    found = bind.execute(query.execution_options(yield_per=10_000))
    for series, points in groupby(found, key=itemgetter(0)):
        number = 0
        for some in _slices(points):
            bind.execute(insert, {"series": series, "number": number, **_packed(some)})
            number += 1
        bind.execute(count, {"series": series, "count": number})


def _slices(points: Iterable[Any]) -> Iterator[list[Any]]:
    some: list[Any] = []
    for point in points:
        some.append(point)
        if len(some) == BLOCK_POINTS:
            yield some
            some = []
    if some:
        yield some


def _packed(points: list[Any]) -> dict[str, Any]:
    _, steps, moments, numbers, nans = zip(*points, strict=True)
    values = [NAN if is_nan else number for number, is_nan in zip(numbers, nans, strict=True)]
    size = len(points)
    return {
        "first_step": steps[0],
        "first_at": moments[0],
        "last_step": steps[-1],
        "last_at": moments[-1],
        "data": struct.pack(f"<{size}q{size}q{size}d", *steps, *moments, *values),
    }
