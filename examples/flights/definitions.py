"""Features of a flight before it leaves: delays by carrier, route and aeroplane over windows, and the weather."""

from __future__ import annotations

from datetime import timedelta

import falaj as fj

LABEL = "late"
ASKED = ("hour", "weekday", "distance")
"""Features from the timetable alone."""
WEATHER = ("temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib")
DELAYS = {"delay_1d": timedelta(days=1), "late_7d": timedelta(days=7), "late_28d": timedelta(days=28)}

ENTITIES = (
    fj.Entity(name="flight", key="flight"),
    fj.Entity(name="carrier", key="carrier"),
    fj.Entity(name="route", key="route"),
    fj.Entity(name="tail", key="tailnum"),
    fj.Entity(name="origin", key="origin"),
)

# No view has a ttl: the demo replays 2013, which would be too old to be read online by today's clock.


def delays_of(entity: str, key: str) -> fj.FeatureView:
    """Mean delay and share of late flights over the last days; a delay happens, here, when the flight arrives."""
    return fj.FeatureView(
        name=f"{entity}_delays",
        entities=(entity,),
        columns=(
            fj.Feature(name="delay", type="float"),
            fj.Feature(name="late", type="float"),
        ),
        sql=f"SELECT {key}, created_time AS event_time, delay, late FROM source",
        known_at="event_time",  # months of 2013 come in one by one, and were known then
        aggregations=tuple(
            fj.Aggregation(name=name, column=name.split("_")[0], function="mean", window=window)
            for name, window in DELAYS.items()
        ),
    )


WEATHER_VIEW = fj.FeatureView(
    name="weather",
    entities=("origin",),
    columns=tuple(fj.Feature(name=name, type="float") for name in WEATHER),
    created_time="created_time",
)
VIEWS = (
    delays_of("carrier", "carrier"),
    delays_of("route", "route"),
    delays_of("tail", "tailnum"),
    WEATHER_VIEW,
)
"""Joined to each flight as known at its scheduled departure."""

FEATURES = (*ASKED, *(f"{view.name}__{feature.name}" for view in VIEWS for feature in view.features))
"""The columns of a model's input, in order."""

FLIGHTS_VIEW = fj.FeatureView(
    name="flights",
    entities=("flight",),
    columns=(
        *(fj.Feature(name=key, type="text") for key in ("carrier", "route", "tailnum", "origin")),
        *(fj.Feature(name=name, type="float") for name in ASKED),
        fj.Feature(name=LABEL, type="integer"),
    ),
    created_time="created_time",
)
"""The flights: the spine of every training set. The label is known when a flight arrives."""

BOARD_VIEW = fj.FeatureView(
    name="board",
    entities=("flight",),
    columns=tuple(fj.Feature(name=name, type="float") for name in FEATURES),
)
"""All features of a flight as they were known at its scheduled departure, for the endpoint to look up by flight."""
