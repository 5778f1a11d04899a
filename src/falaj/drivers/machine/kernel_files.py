"""Reads small files of the kernel under /proc and /sys, or under a recorded copy of them."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str:
    """Return the stripped text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the number in a file; none if there is none, or if it is negative, by which the kernel means absent."""
    text = read_text(path)
    return int(text) if text.isdecimal() else None


def list_entries(folder: Path) -> list[Path]:
    """Return the entries of a folder by name; empty if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
