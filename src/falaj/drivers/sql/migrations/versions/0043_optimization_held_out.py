"""The held-out set and the student's job of optimizations."""

from __future__ import annotations

from alembic import op

revision = "0043"
down_revision = "0041"


def upgrade() -> None:
    for name in ("held_out", "student"):  # in SQLite a foreign key can only be added with its column
        op.execute(
            f"ALTER TABLE optimization_optimizations ADD COLUMN {name} TEXT REFERENCES governance_objects (id)"
        )
