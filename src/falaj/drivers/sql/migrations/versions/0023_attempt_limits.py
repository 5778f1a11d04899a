"""How the limits of the current attempt are enforced, and by which home it runs, for how long without renewal."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.add_column("training_jobs", sa.Column("limits", sa.Text()))
    op.add_column("training_jobs", sa.Column("home", sa.Text()))
    op.add_column("training_jobs", sa.Column("fence_s", sa.Integer()))
