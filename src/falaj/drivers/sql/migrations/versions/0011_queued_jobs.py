"""What the queue knows of a job, beside its spec."""

from __future__ import annotations

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    pass
