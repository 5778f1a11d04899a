"""An index of tiny packages for pip, without network."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from falaj.assembly.images.context import WHEEL


def offline_index(folder: Path, monkeypatch: pytest.MonkeyPatch, **wheels: str) -> None:
    """Let pip find these packages and nothing else; each is a wheel that needs what its value says."""
    folder.mkdir()
    for name, needs in wheels.items():
        info = f"{name}-1.0.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        metadata += f"Requires-Dist: {needs}\n" if needs else ""
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "VALUE = 1\n")
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(f"{info}/WHEEL", WHEEL)
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
