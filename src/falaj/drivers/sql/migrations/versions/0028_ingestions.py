"""The uploads that were added to a view; and the first version of a table that does not have a file."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0026"


def upgrade() -> None:
    op.create_table(
        "features_ingestions",
        sa.Column("id", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("sha256", sa.Text(), primary_key=True),
        sa.Column("at", sa.BigInteger(), nullable=False),
    )
    op.add_column("features_table_files", sa.Column("until", sa.BigInteger()))
