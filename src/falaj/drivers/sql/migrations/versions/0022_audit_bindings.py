"""The audit log is bound: a MAC of each entry, the tree under each head, and the statements that the log makes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.add_column("governance_audit_entries", sa.Column("mac", sa.LargeBinary()))
    op.add_column("governance_audit_heads", sa.Column("frontier", sa.Text()))
    op.add_column("governance_audit_state", sa.Column("statements", sa.Text()))
