"""Gates of aliases, measurements, waivers, evidence of approvals and promotions; the format of webhooks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0040"
down_revision = "0038"


def upgrade() -> None:
    op.add_column("governance_webhooks", sa.Column("written_as", sa.Text()))
    op.add_column("registry_approvals", sa.Column("evidence", sa.Text()))
    op.add_column("registry_alias_changes", sa.Column("evidence", sa.Text()))
    op.create_table(
        "registry_gates",
        sa.Column("model", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("alias", sa.Text(), primary_key=True),
        sa.Column("seq", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("rules", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("by", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "registry_measurements",
        sa.Column("version", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("data", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("metric", sa.Text(), primary_key=True),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("run", sa.Text(), sa.ForeignKey("governance_objects.id")),
        sa.Column("by", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "registry_waivers",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("version", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("alias", sa.Text(), nullable=False),
        sa.Column("gates", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("withdrawn_at", sa.BigInteger()),
    )
    op.create_index("registry_waivers_version", "registry_waivers", ["version", "alias"])
