"""What the kernel tells in small files: under /proc and /sys, or under a recorded copy of them."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str:
    """The file's text without the space around it; nothing where there is none, or it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The number in the file; none where there is none. The kernel says -1 for what does not exist."""
    text = read_text(path)
    return int(text) if text.isdecimal() else None


def list_entries(folder: Path) -> list[Path]:
    """What lies in a folder, by name; nothing where there is no such folder."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
