"""One histogram: rows by bins of a number, or by words."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.apps.console.charts.options import Options, axis, framed
from falaj.apps.console.charts.palette import Palette


def histogram(
    labels: Sequence[str], counts: Sequence[float], colours: Palette, *, title: str, name: str, unit: str = ""
) -> Options:
    """Return bars over bins or words; `name` says what was counted."""
    options = framed(colours, title=title, legend=[name])
    options["tooltip"]["trigger"] = "axis"
    options["xAxis"] = axis("category", colours, name="value", unit=unit, labels=labels)
    options["yAxis"] = axis("value", colours, name=name, at="y") | {"scale": False}
    options["series"] = [
        {
            "type": "bar",
            "name": name,
            "barCategoryGap": "8%",
            "itemStyle": {"color": colours.series[0]},
            "data": [*counts],
        }
    ]
    return options
