"""`falaj modelversions`: versions of all models."""

from __future__ import annotations

from falaj.apps.cli.generation.presentation import Presentation
from falaj.records.registry import ModelVersion

PRESENTATION = Presentation(
    columns={ModelVersion: ("name", "number", "format", "run", "aliases", "description", "created_at")},
    help={
        "where": "A condition in MLflow's filter language.",
        "order_by": "What to sort by, such as 'version_number DESC' (may be repeated).",
    },
)
