"""Labels without a score: what was predicted for them is not a finite number."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("serving_labels", "score", nullable=True)
        op.execute("UPDATE serving_labels SET score = NULL WHERE score IN ('NaN', 'Infinity', '-Infinity')")
        return
    op.rename_table("serving_labels", "serving_labels_before")
    op.drop_index("serving_labels_version", "serving_labels_before")
    op.create_table(
        "serving_labels",
        sa.Column("prediction", sa.Text(), primary_key=True),
        sa.Column("endpoint", sa.Text(), sa.ForeignKey("governance_objects.id"), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("predicted_at", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("score", sa.Double()),
    )
    op.execute(
        "INSERT INTO serving_labels SELECT prediction, endpoint, version, predicted_at, value, "
        "CASE WHEN abs(score) > 1.7976931348623157e308 THEN NULL ELSE score END FROM serving_labels_before"
    )
    op.create_index("serving_labels_version", "serving_labels", ["endpoint", "version", "predicted_at"])
    op.drop_table("serving_labels_before")
