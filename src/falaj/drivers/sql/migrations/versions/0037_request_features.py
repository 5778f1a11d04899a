"""Request-time features of training sets."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"


def upgrade() -> None:
    op.add_column("features_training_sets", sa.Column("request_features", sa.Text()))
