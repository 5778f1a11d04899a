"""`falaj experiments`: groups of runs."""

from __future__ import annotations

from falaj.apps.cli.generation.presentation import Presentation
from falaj.records.tracking import Experiment

PRESENTATION = Presentation(
    columns={Experiment: ("name", "id", "created_at", "updated_at", "deleted_at")},
    help={
        "where": "A condition in MLflow's filter language.",
        "order_by": "What to sort by, such as 'last_update_time DESC' (may be repeated).",
        "view": "active, deleted or all.",
    },
    lists={"experiment": "experiments list"},
)
