"""Optimizations, and the variants that they tried."""

from __future__ import annotations

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Nothing yet."""
