"""`falaj loggedmodels`: models that runs made."""

from __future__ import annotations

from falaj.apps.cli.generation.presentation import Presentation
from falaj.records.tracking import LoggedModel

PRESENTATION = Presentation(
    columns={LoggedModel: ("name", "id", "status", "experiment", "source_run", "created_at")},
    help={
        "where": "A condition in MLflow's filter language.",
        "order_by": "What to sort by, such as 'last_update_time DESC' (may be repeated).",
        "view": "active, deleted or all.",
    },
    lists={"logged_model": "loggedmodels list"},
)
