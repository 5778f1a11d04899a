"""Descriptions and tags of registered models and versions, uploads in parts, and which artifacts may be pickles."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0044"
down_revision = "0043"


def upgrade() -> None:
    op.add_column("tracking_artifacts", sa.Column("unsafe", sa.Boolean()))
    op.create_table(
        "registry_notes",
        _object("id", primary_key=True),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "registry_tags",
        _object("object", primary_key=True),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("value", sa.Text(), nullable=False),
    )
    op.create_table(
        "tracking_uploads",
        _object("id", primary_key=True),
        _object("owner"),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
    )
    op.create_index("tracking_uploads_started", "tracking_uploads", ["started_at"])
    op.create_table(
        "tracking_upload_parts",
        _object("upload", primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        _object("blob"),
    )


def _object(name: str, *, primary_key: bool = False) -> sa.Column[str]:
    reference = sa.ForeignKey("governance_objects.id")
    return sa.Column(name, sa.Text(), reference, primary_key=primary_key, nullable=False)
