"""Where things lie unless the environment says otherwise."""

from __future__ import annotations

import os
from pathlib import Path


def default_home() -> Path:
    return Path(os.environ.get("FALAJ_HOME") or ".falaj")


def default_config_dir() -> Path:
    """Where keys, witness and credentials lie: outside every home."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get("FALAJ_CONFIG_DIR") or Path(base) / "falaj")
