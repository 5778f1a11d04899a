"""`falaj zones`: zones, and which objects they may store."""

from __future__ import annotations

from falaj.apps.cli.generation.presentation import Presentation

PRESENTATION = Presentation(lists={"zone": "zones list"})
