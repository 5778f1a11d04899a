"""What all charts have: a title that is read aloud, axes with units, a legend, a tooltip, and zoom."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from falaj.apps.console.charts.palette import Palette

WORD_JOINER = "\u2060"
"""A character that is not seen, and where no line is broken."""
INHERITED = re.compile(
    "__(?:proto|defineGetter|defineSetter|lookupGetter|lookupSetter)__|constructor|hasOwnProperty"
    "|isPrototypeOf|propertyIsEnumerable|toLocaleString|toString|valueOf"
)
"""What every object of JavaScript inherits; in any part of a text, since texts are measured by words and lines."""

Options = dict[str, Any]
Scale = Literal["linear", "log"]


def framed(
    colours: Palette,
    *,
    title: str,
    legend: Sequence[str] = (),
    zoom: Literal["x", "xy", "none"] = "none",
    named_y: bool = True,
) -> Options:
    """Return the options that all charts begin with; `title` says in a sentence what the chart shows.

    `named_y`: the vertical axis has a name, which stands above it.
    """
    options: Options = {
        "aria": {"enabled": True, "label": {"description": title}},
        "animation": False,
        "backgroundColor": "transparent",
        "textStyle": {"color": colours.ink, "fontFamily": "system-ui, sans-serif"},
        "color": [*colours.series],
        "grid": {
            "left": 12,
            "right": 24,
            "top": (40 if legend else 16) + (16 if named_y else 0),
            "bottom": 64 if zoom != "none" else 40,
            "containLabel": True,
        },
        "tooltip": {
            "trigger": "item",
            "confine": True,
            "backgroundColor": colours.paper,
            "borderColor": colours.line,
            "textStyle": {"color": colours.ink},
        },
    }
    if legend:
        options["legend"] = {
            "type": "scroll",
            "top": 0,
            "data": [*legend],
            "textStyle": {"color": colours.ink},
            "pageTextStyle": {"color": colours.muted},
            "pageIconColor": colours.muted,
        }
    if zoom != "none":
        options["dataZoom"] = [
            {"type": "inside", "filterMode": "none"},
            {
                "type": "slider",
                "filterMode": "none",
                "height": 18,
                "bottom": 8,
                "borderColor": colours.line,
                "textStyle": {"color": colours.muted},
            },
        ]
        if zoom == "xy":
            options["dataZoom"].append({"type": "inside", "yAxisIndex": 0, "filterMode": "none"})
    return options


def axis(
    kind: Literal["value", "log", "category", "time"],
    colours: Palette,
    *,
    name: str = "",
    unit: str = "",
    labels: Sequence[str] | None = None,
    at: Literal["x", "y"] = "x",
) -> Options:
    """Return an axis; its name has the unit in brackets."""
    words = f"{name} [{unit}]" if unit else name
    found: Options = {
        "type": kind,
        "name": words,
        "nameLocation": "middle" if at == "x" else "end",  # beside the axis, it would hide long labels
        "nameGap": 28 if at == "x" else 12,
        "nameTextStyle": {"color": colours.muted, "align": "center" if at == "x" else "left"},
        "axisLabel": {"color": colours.muted, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": colours.line}},
        "splitLine": {"show": kind != "category", "lineStyle": {"color": colours.line}},
    }
    if kind == "value":
        found["scale"] = True
    if labels is not None:
        found["data"] = [*labels]
        found["axisLabel"] |= {"width": 140, "overflow": "truncate"}
    return found


def plain_options(options: Any) -> Any:
    """Return `options` with texts that are safe to draw, if no key of them begins with a colon.

    The framework would run the value of such a key as a script: names that people chose stand in values only. And the
    chart library remembers the widths of texts in objects that have a prototype: drawing "__proto__" would change it.
    """
    if isinstance(options, dict):
        for key in options:
            if not isinstance(key, str) or key.startswith(":"):
                raise ValueError(f"a chart has the key {key!r}; names belong in values")
        return {key: plain_options(value) for key, value in options.items()}
    if isinstance(options, (list, tuple)):
        return [
            plain_options(value) if isinstance(value, (dict, list, tuple, str)) else value
            for value in options
        ]
    return INHERITED.sub(_interrupt, options) if isinstance(options, str) else options


def _interrupt(found: re.Match[str]) -> str:
    return found[0][0] + WORD_JOINER + found[0][1:]


def given_text(drawn: str) -> str:
    """Return the text that `plain_options` was given."""
    return drawn.replace(WORD_JOINER, "")
