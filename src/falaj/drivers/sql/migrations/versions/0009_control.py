"""Pipelines, their runs and what starts them."""

from __future__ import annotations

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Nothing yet."""
