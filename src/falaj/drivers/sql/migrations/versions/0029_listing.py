"""An index for lists: the objects of a kind in a workspace, by id."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"


def upgrade() -> None:
    living = sa.text("deleted_at IS NULL")
    op.create_index(
        "governance_objects_listed",
        "governance_objects",
        ["workspace", "kind", "id"],
        sqlite_where=living,
        postgresql_where=living,
    )
