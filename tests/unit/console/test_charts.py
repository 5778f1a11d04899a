"""Charts: options of ECharts from values, with units, legends and colours that can be told apart."""

from __future__ import annotations

import json
import math

import pytest

from falaj.apps.console.charts.bars import Bar, bar_chart, histogram_pair
from falaj.apps.console.charts.graphs import GraphNode, ParetoPoint, front, graph, layered, pareto
from falaj.apps.console.charts.grids import GanttBar, gantt, heat_map
from falaj.apps.console.charts.lines import Curve, line_chart, smoothed
from falaj.apps.console.charts.options import given_text, plain_options
from falaj.apps.console.charts.palette import DARK, LIGHT, Palette, series_style

BOTH = pytest.mark.parametrize("colours", [LIGHT, DARK])


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@BOTH
def test_every_colour_stands_out_from_the_page(colours: Palette) -> None:
    assert all(contrast(each, colours.paper) >= 3 for each in colours.series)
    assert contrast(colours.ink, colours.paper) >= 7
    assert contrast(colours.muted, colours.paper) >= 4.5
    assert len({series_style(number, colours) for number in range(3 * len(colours.series))}) == 21


@BOTH
def test_the_ramp_of_heat_maps_goes_one_way(colours: Palette) -> None:
    steps = [luminance(each) for each in colours.ramp]

    assert steps in (sorted(steps), sorted(steps, reverse=True))


def test_curves_have_units_and_leave_gaps_for_what_is_no_number() -> None:
    curve = Curve("loss", (1.0, 2.0, 3.0, 4.0), (1.0, math.nan, 0.0, None))

    linear = line_chart([curve], LIGHT, title="Loss", y_name="loss", y_unit="nats")
    logarithmic = line_chart([curve], LIGHT, title="Loss", scale="log")

    assert linear["yAxis"]["name"] == "loss [nats]"
    assert [point[1] for point in linear["series"][0]["data"]] == [1.0, None, 0.0, None]
    assert [point[1] for point in logarithmic["series"][0]["data"]] == [1.0, None, None, None]
    assert linear["aria"]["label"]["description"] == "Loss"
    json.dumps(linear, allow_nan=False)


def test_smoothing_begins_at_the_first_value_and_keeps_gaps() -> None:
    found = smoothed((2.0, 2.0, None, 2.0), 0.9)

    assert found == pytest.approx((2.0, 2.0, None, 2.0))
    with pytest.raises(ValueError, match="below 1"):
        smoothed((1.0,), 1.0)


def test_the_curves_as_they_are_stay_visible_beneath_smooth_ones() -> None:
    options = line_chart([Curve("loss", (1.0, 2.0), (1.0, 3.0))], LIGHT, title="Loss", smoothing=0.5)

    pale, smooth = options["series"]
    assert pale["lineStyle"]["opacity"] < 1
    assert smooth["data"][1][1] < 3


def test_bars_have_their_limits_as_marks() -> None:
    options = bar_chart(
        [Bar("a", (1, 2), 4), Bar("b", (0, 0))], ("held", "borrowed"), LIGHT, title="x", unit="GPUs"
    )

    assert [each["name"] for each in options["series"]] == ["held", "borrowed", "limit"]
    assert options["series"][2]["data"] == [[4, 0]]


def test_histograms_of_different_sizes_are_compared_as_shares() -> None:
    options = histogram_pair((0, 1, 2), (1, 3), (0, 0), LIGHT, title="x")

    assert [each["data"] for each in options["series"]] == [[25.0, 75.0], [0.0, 0.0]]


def test_a_heat_map_leaves_out_what_is_not_known() -> None:
    options = heat_map(["a"], ["1", "2"], [[None, 0.5]], LIGHT, title="x", unit="PSI")

    assert options["series"][0]["data"] == [[1, 0, 0.5]]
    assert heat_map([], [], [], LIGHT, title="x", unit="PSI")["visualMap"]["max"] == 1.0


def test_bars_at_the_same_time_get_rows_of_their_own() -> None:
    spans = [
        GanttBar("gpu 0", "a", 0, 5, "x"),
        GanttBar("gpu 0", "b", 3, 8, "y"),
        GanttBar("gpu 0", "c", 5, 9, "x"),
    ]

    options = gantt(spans, LIGHT, title="x", now_ms=9)

    assert options["yAxis"]["data"] == ["gpu 0", "gpu 0 (2)"]


def test_nodes_stand_behind_their_sources_also_in_a_circle() -> None:
    places = layered(["a", "b", "c"], [("a", "b"), ("b", "c"), ("a", "c")])

    assert [places[key][0] for key in "abc"] == [0, 1, 2]
    assert {*layered(["a", "b"], [("a", "b"), ("b", "a"), ("b", "gone")])} == {"a", "b"}


def test_the_front_has_what_no_other_is_better_than() -> None:
    points = [
        ParetoPoint("slow", 9, 0.9),
        ParetoPoint("bad", 5, 0.1),
        ParetoPoint("fast", 1, 0.5),
        ParetoPoint("same", 1, 0.4),
    ]

    assert [each.name for each in front(points)] == ["fast", "slow"]
    assert [each.name for each in front(points, y_better=-1)] == ["same", "bad"]


def test_a_refused_candidate_is_drawn_and_not_on_the_front() -> None:
    points = [ParetoPoint("original", 2, 0.5), ParetoPoint("int8", 1, 0.6, is_refused=True)]

    options = pareto(points, LIGHT, title="t", x_name="x", x_unit="µs", y_name="y")

    drawn, best = ([each["name"] for each in series["data"]] for series in options["series"])
    assert (drawn, best) == (["original", "int8"], ["original"])


def test_names_never_become_keys_that_the_framework_runs() -> None:
    hostile = ":onclick"

    plain_options(graph([GraphNode("a", hostile, hostile)], [], LIGHT, title=hostile))
    with pytest.raises(ValueError, match="names belong in values"):
        plain_options({"series": [{"data": [{hostile: "alert(1)"}]}]})


@pytest.mark.parametrize("name", ["__proto__", "constructor", "toString", "a __proto__\n__proto__ b"])
def test_no_text_of_a_chart_names_what_objects_inherit(name: str) -> None:
    options = line_chart([Curve(name, (1.0,), (2.0,))], LIGHT, title=name, y_name=name)

    drawn = plain_options(options)

    shown = json.dumps(drawn)
    assert "__proto__" not in shown
    assert '"constructor"' not in shown
    assert '"toString"' not in shown
    assert given_text(drawn["series"][0]["name"]) == name
    assert drawn["series"][0]["data"] == [[1.0, 2.0]]
