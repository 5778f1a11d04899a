"""`falaj uploads`: files that arrive in parts."""

from __future__ import annotations

from falaj.apps.cli.generation.presentation import Presentation
from falaj.records.tracking import Upload

PRESENTATION = Presentation(
    columns={Upload: ("id", "owner", "path")},
    help={"owner": "A run or a logged model.", "parts": "The parts that were sent, as JSON."},
)
