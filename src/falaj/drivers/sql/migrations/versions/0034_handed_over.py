"""Jobs whose attempt waits in the queue of a cluster."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    op.add_column(
        "training_jobs",
        sa.Column("handed_over", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_index("training_jobs_handed_over", "training_jobs", ["handed_over"])
