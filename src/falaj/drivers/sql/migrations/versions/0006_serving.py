"""Endpoints, what they answered, and the labels that came later."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    _endpoints()
    _answers()


def _object(name: str = "id", *, primary_key: bool = False) -> sa.Column[str]:
    key = sa.ForeignKey("governance_objects.id")
    return sa.Column(name, sa.Text(), key, primary_key=primary_key, nullable=False)


def _endpoints() -> None:
    op.create_table(
        "serving_revision",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "serving_endpoints",
        _object(primary_key=True),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("routes", sa.Text(), nullable=False),
        sa.Column("previous", sa.Text(), nullable=False),
        sa.Column("lookup", sa.Text()),
        sa.Column("scoring", sa.Text()),
        sa.Column("changed_at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "serving_problems",
        _object("endpoint", primary_key=True),
        sa.Column("version", sa.Text(), primary_key=True),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
    )


def _answers() -> None:
    op.create_table(
        "serving_counts",
        _object("endpoint", primary_key=True),
        sa.Column("version", sa.Text(), primary_key=True),
        sa.Column("at", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("errors", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("lost", sa.BigInteger(), nullable=False),
        sa.Column("latency", sa.Text(), nullable=False),
    )
    op.create_table(
        "serving_batches",
        _object(primary_key=True),
        _object("endpoint"),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
    )
    op.create_index("serving_batches_endpoint", "serving_batches", ["endpoint", "id"])
    op.create_table(
        "serving_labels",
        sa.Column("prediction", sa.Text(), primary_key=True),
        _object("endpoint"),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("predicted_at", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("score", sa.Double(), nullable=False),
    )
    op.create_index("serving_labels_version", "serving_labels", ["endpoint", "version", "predicted_at"])
