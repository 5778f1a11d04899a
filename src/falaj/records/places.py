"""Default locations of the home and of the configuration directory."""

from __future__ import annotations

import os
from pathlib import Path


def default_home() -> Path:
    return Path(os.environ.get("FALAJ_HOME") or ".falaj")


def default_config_dir() -> Path:
    """Return the directory of keys, witness and credentials: outside every home."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get("FALAJ_CONFIG_DIR") or Path(base) / "falaj")
