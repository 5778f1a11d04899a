"""Colours of charts: those of Okabe and Ito, which people see apart whatever colours they see, darker or lighter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Palette:
    """Colours on one background; `series` are used in their order, with another line style after the last."""

    series: tuple[str, ...]
    ink: str
    muted: str
    line: str
    paper: str
    ramp: tuple[str, ...]
    """From little to much, for heat maps: its lightness alone tells the order."""
    good: str
    bad: str


LIGHT = Palette(
    series=("#0072b2", "#d55e00", "#007a5a", "#a8508a", "#946c00", "#2f6f9f", "#5f5f5f"),
    ink="#12343b",
    muted="#51666a",
    line="#ddd5c4",
    paper="#fffdf8",
    ramp=("#fff7e6", "#f9d49a", "#ef9a4d", "#cf5a1e", "#7d2a0c"),
    good="#007a5a",
    bad="#d55e00",
)
DARK = Palette(
    series=("#56b4e9", "#e69f00", "#2bc79a", "#e39cc8", "#f0e442", "#ff8a4c", "#c9d3d2"),
    ink="#e8efe9",
    muted="#a7bcba",
    line="#34504e",
    paper="#182b2a",
    ramp=("#20302f", "#5c4420", "#a2661c", "#e0902f", "#ffd28a"),
    good="#2bc79a",
    bad="#ff8a4c",
)
LINE_STYLES = ("solid", "dashed", "dotted")


def palette(is_dark: bool) -> Palette:
    """Return the colours for a page."""
    return DARK if is_dark else LIGHT


def series_style(number: int, colours: Palette) -> tuple[str, str]:
    """Return colour and line style of a series by its number."""
    count = len(colours.series)
    return colours.series[number % count], LINE_STYLES[number // count % len(LINE_STYLES)]
