"""The packages of a Python, as a text. Standard library only: the worker of a pod lists those of its image."""

from __future__ import annotations

import platform
import sys
from functools import cache
from importlib.metadata import distributions


@cache
def list_packages(
    version: str = platform.python_version(),
    executable: str = sys.executable,
    sites: tuple[str, ...] | None = None,
) -> str:
    """Return an interpreter and its packages, one per line; by default those of the Python that runs now."""
    found = distributions() if sites is None else distributions(path=list(sites))
    packages = sorted({f"{each.name}=={each.version}" for each in found}, key=str.lower)
    return "\n".join([f"# Python {version}", f"# {platform.platform()}", f"# {executable}", *packages, ""])
