"""Sizes in words."""

from __future__ import annotations


def format_bytes(size: int) -> str:
    """10.6 GiB, 512 MiB, 3 KiB: three digits, in the largest unit that leaves at least one of them."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:.0f} {name}"
    return f"{size} bytes"
