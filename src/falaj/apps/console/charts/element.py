"""The element that draws a chart, with its sentence for people who do not see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui import events, ui

from falaj.apps.console.charts.options import Options, given_text, plain_options


def chart(
    options: Options, *, height_px: int = 320, on_click: Callable[[dict[str, Any]], None] | None = None
) -> ui.echart:
    """Draw a chart. `on_click` gets the data of the point that was clicked: for a graph, its `target`."""
    clicked = None
    if on_click is not None:

        def clicked(event: events.EChartPointClickEventArguments) -> None:
            data = event.data if isinstance(event.data, dict) else {"value": event.data}
            on_click(
                {key: given_text(value) if isinstance(value, str) else value for key, value in data.items()}
            )

    element = ui.echart(plain_options(options), on_point_click=clicked)
    element.classes("chart").style(f"height: {height_px}px").props["role"] = "img"
    element.props["aria-label"] = options["aria"]["label"]["description"]
    return element


def replace_chart(element: ui.echart, options: Options) -> None:
    """Show other options in a chart that is drawn already: faster than a new one, and the zoom stays."""
    element.options.clear()
    element.options.update(plain_options(options))
    element.update()
