"""Who granted a role, made a user and issued a token; approvals that record it; endpoints that need approval."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0019"


def upgrade() -> None:
    for table, column in (
        ("governance_principals", sa.Column("created_by", sa.Text())),
        ("governance_group_members", sa.Column("added_by", sa.Text())),
        ("governance_group_members", sa.Column("added_at", sa.BigInteger())),
        ("governance_grants", sa.Column("granted_by", sa.Text())),
        ("governance_grants", sa.Column("granted_at", sa.BigInteger())),
        ("governance_tokens", sa.Column("vouched_by", sa.Text())),
        ("governance_sign_in_codes", sa.Column("vouched_by", sa.Text())),
        ("registry_aliases", sa.Column("independent", sa.Boolean())),
        ("registry_approvals", sa.Column("appointment", sa.Text())),
        ("registry_approvals", sa.Column("independent", sa.Boolean())),
    ):
        op.add_column(table, column)
    op.create_table(
        "serving_protections",
        sa.Column("workspace", sa.Text(), sa.ForeignKey("governance_objects.id"), primary_key=True),
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("alias", sa.Text()),
        sa.Column("independent", sa.Boolean(), nullable=False),
        sa.Column("by", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
    )
