"""Default locations of the home and of the configuration directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

HOME_FOLDER = ".falaj"


def default_home() -> Path:
    """Return FALAJ_HOME, else the nearest home in this folder or above it, else `.falaj` in this folder."""
    named = os.environ.get("FALAJ_HOME")
    return Path(named) if named else nearest_home() or Path(HOME_FOLDER)


def nearest_home() -> Path | None:
    """Return the `.falaj` in this folder, or the nearest one in a folder above it, as git searches.

    The search ends at another file system, and at the first folder that belongs to someone else. Above this folder a
    home counts only if it is the user's own, and a link is its own owner's, wherever it leads to: nobody else can
    choose the home of those who work below a folder that they can write to.
    """
    try:
        here = Path.cwd()
        if os.path.lexists(here / HOME_FOLDER):
            return Path(HOME_FOLDER)  # whose it is, is checked where it is opened
        user, device = os.geteuid(), os.stat(here).st_dev
        for folder in (here, *here.parents):
            facts = os.stat(folder)
            if (facts.st_uid, facts.st_dev) != (user, device):
                return None
            if _is_own_folder(folder / HOME_FOLDER, user):
                return folder / HOME_FOLDER
    except OSError:  # the folder was removed, or may not be read
        return None
    return None


def _is_own_folder(path: Path, user: int) -> bool:
    try:
        return os.lstat(path).st_uid == user and stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def default_config_dir() -> Path:
    """Return the directory of keys, witness and credentials: outside every home."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get("FALAJ_CONFIG_DIR") or Path(base) / "falaj")
