"""An export of Weights & Biases in JSON lines: a line for each run, then its history, then how many rows it has."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, TypeGuard

from falaj.errors import Fault, InvalidInput
from falaj.records.tracking import INT64_MAX, INT64_MIN, RunStatus
from falaj.sdk.run_import.local_files import list_files, read_file
from falaj.sdk.run_import.source import (
    EPOCH,
    SourceExperiment,
    SourceFile,
    SourceModel,
    SourceNotes,
    SourceOwner,
    SourcePoint,
    SourceRun,
)

RUN, END = "wandb_run", "wandb_end"
LINE_BYTES = 256 << 20
MOST_FAULTS = 20
STATES = {
    "finished": RunStatus.FINISHED,
    "failed": RunStatus.FAILED,
    "crashed": RunStatus.FAILED,
    "killed": RunStatus.KILLED,
    "running": RunStatus.RUNNING,
    "pending": RunStatus.SCHEDULED,
    "preempting": RunStatus.RUNNING,
    "preempted": RunStatus.KILLED,
}
OWN_FIELDS = {"id", "project", "name", "state", "user", "created_at", "ended_at", "config", "summary"}
"""Fields of a run that have a place of their own; all others become tags."""
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass
class IndexedRun:
    """Where the lines of a run are, and what its history has."""

    line: int
    offset: int
    history: int
    run: SourceRun
    extra: list[SourcePoint]
    series: dict[str, int]
    rows: int = 0
    last_step: int | None = None
    is_ended: bool = False


class WandbExport:
    """A file of JSON lines. It is read once before anything is copied, so that a cut one is refused whole."""

    kind = "wandb"

    def __init__(self, path: Path, *, artifacts: Path | None = None) -> None:
        """`artifacts` has a folder with the files of each run, named as the run."""
        self.where = str(path)
        self.notes = SourceNotes()
        self._files = artifacts
        try:
            self._file: IO[bytes] = path.open("rb")
        except OSError as error:
            raise InvalidInput.at(
                str(path), given=error.strerror, allowed="a file that can be read"
            ) from None
        try:
            self._index = _Indexer(self.where, self.notes).read(self._file)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def experiments(self) -> list[SourceExperiment]:
        projects = dict.fromkeys(each.run.experiment for each in self._index.values())
        return [SourceExperiment(name, name, f"wandb:{name}", {}) for name in projects]

    def rows(self, experiments: Sequence[SourceExperiment]) -> int:
        chosen = {each.id for each in experiments}
        return sum(
            1 + sum(each.series.values()) for each in self._index.values() if each.run.experiment in chosen
        )

    def runs(self, experiment: SourceExperiment) -> Iterator[SourceRun]:
        for each in list(self._index.values()):
            if each.run.experiment == experiment.id:
                yield each.run

    def series(self, run: SourceRun) -> Mapping[str, int]:
        return self._index[run.id].series

    def points(self, run: SourceRun, keys: Collection[str]) -> Iterator[SourcePoint]:
        """Yield the points row by row: a row has one step and one time."""
        indexed = self._index[run.id]
        position = indexed.history
        for _ in range(indexed.rows):
            self._file.seek(position)
            row = json.loads(self._file.readline())
            position = self._file.tell()
            yield from (point for point in row_points(row, run, SourceNotes()) if point.key in keys)
        yield from (point for point in indexed.extra if point.key in keys)

    def models(self, experiment: SourceExperiment) -> Iterator[SourceModel]:
        """W&B has none: its models are artifacts."""
        return iter(())

    def files(self, owner: SourceOwner) -> list[SourceFile]:
        folder = self._folder(owner)
        return [] if folder is None else list_files(folder, self.notes)

    def read(self, owner: SourceOwner, path: str) -> Iterator[bytes]:
        folder = self._folder(owner)
        return iter(()) if folder is None else read_file(folder, path)

    def _folder(self, owner: SourceOwner) -> Path | None:
        name = owner.id.rpartition("/")[2]
        if self._files is None or name in ("", ".", ".."):
            return None
        folder = self._files / name
        return folder if folder.is_dir() and not folder.is_symlink() else None


class _Indexer:
    """Reads an export from start to end, and collects its faults."""

    def __init__(self, where: str, notes: SourceNotes) -> None:
        self._where = where
        self._notes = notes
        self._faults: list[Fault] = []
        self._found: dict[str, IndexedRun] = {}
        self._open: IndexedRun | None = None

    def read(self, file: IO[bytes]) -> dict[str, IndexedRun]:
        number, offset = 0, 0
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            start, offset = offset, offset + len(line)
            self._line(number, start, offset, line)
            if len(self._faults) >= MOST_FAULTS:
                break
        if self._open is not None:
            self._fault(
                number, f"the end of the file inside run {self._open.run.id}", "a line with wandb_end"
            )
        if self._faults:
            raise InvalidInput(f"{self._where} is no whole export of W&B", faults=self._faults)
        if not self._found:
            raise InvalidInput.at(self._where, given="no run", allowed=f'lines that begin with {{"{RUN}": ')
        return self._found

    def _line(self, number: int, start: int, end: int, line: bytes) -> None:
        if len(line) > LINE_BYTES:
            self._fault(
                number,
                f"more than {LINE_BYTES} bytes",
                f"lines of at most {LINE_BYTES >> 20} MiB",
                final=True,
            )
            return
        if not line.strip():
            return
        if not line.endswith(b"\n"):
            self._fault(number, "a line that is cut: it has no end", "whole lines; export again")
            return
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            self._fault(number, str(error), "one JSON object in each line")
            return
        if not isinstance(found, dict):
            self._fault(number, type(found).__name__, "one JSON object in each line")
        elif RUN in found:
            self._begin(number, start, end, found[RUN])
        elif END in found:
            self._end(number, found)
        elif self._open is None:
            self._fault(number, "a row outside of a run", f'a line {{"{RUN}": …}} before its history')
        else:
            self._row(number, found, self._open)

    def _begin(self, number: int, start: int, end: int, given: Any) -> None:
        if self._open is not None:
            self._fault(number, f"a run inside run {self._open.run.id}", f"a line with {END} before it")
            self._open = None
        try:
            run, extra = read_run(given)
        except InvalidInput as error:
            self._faults += [
                fault.model_copy(update={"where": f"line {number}: {fault.where}"}) for fault in error.faults
            ]
            return
        if run.id in self._found:
            self._fault(number, f"run {run.id} again", "each run once")
            return
        self._open = self._found[run.id] = IndexedRun(number, start, end, run, extra, {})

    def _row(self, number: int, row: dict[str, Any], run: IndexedRun) -> None:
        step = row.get("_step")
        if not _is_whole(step) or not INT64_MIN <= step <= INT64_MAX:
            self._fault(number, f"_step {step!r}", "a row with a whole number as _step")
            return
        if run.last_step is not None and step <= run.last_step:
            self._fault(number, f"_step {step} after {run.last_step}", "rows whose _step increases")
            return
        run.last_step = step
        run.rows += 1
        for point in row_points(row, run.run, self._notes):
            run.series[point.key] = run.series.get(point.key, 0) + 1

    def _end(self, number: int, found: dict[str, Any]) -> None:
        run, self._open = self._open, None
        if run is None:
            self._fault(number, f"{END} outside of a run", f'a line {{"{RUN}": …}} before it')
            return
        if found.get("rows") != run.rows:
            self._fault(
                number, f"{run.rows} rows of run {run.run.id}", f"{found.get('rows')!r} rows, as {END} says"
            )
        run.extra = [
            point._replace(step=run.last_step or 0) for point in run.extra if point.key not in run.series
        ]
        run.series |= {point.key: 1 for point in run.extra}

    def _fault(self, number: int, given: str, allowed: str, *, final: bool = False) -> None:
        self._faults += [Fault(where=f"line {number}", given=given[:200], allowed=allowed)]
        if final:
            raise InvalidInput(f"{self._where} is no whole export of W&B", faults=self._faults)


def read_run(given: Any) -> tuple[SourceRun, list[SourcePoint]]:
    """Return a run and the numbers of its summary, as points of its end."""
    if not isinstance(given, dict):
        raise InvalidInput.at(RUN, given=type(given).__name__, allowed="an object")
    ident, project = (_required(given, name) for name in ("id", "project"))
    started = _moment(given.get("created_at"), "created_at")
    if started is None:
        raise InvalidInput.at("created_at", given="nothing", allowed="a moment like 2026-05-03T12:00:00Z")
    state = str(given.get("state") or "finished").lower()
    if state not in STATES:
        raise InvalidInput.at("state", given=state, allowed=", ".join(STATES))
    config, summary = (_object(given, name) for name in ("config", "summary"))
    runtime = summary.get("_runtime")
    ended = _moment(given.get("ended_at"), "ended_at") or (
        _after(started, runtime) if _is_number(runtime) else started
    )
    tags = {
        f"wandb.{key}": as_text(value)
        for key, value in given.items()
        if key not in OWN_FIELDS and value not in (None, "", [], {})
    }
    points = []
    results = dict(flatten({key: value for key, value in summary.items() if not key.startswith("_")}))
    for key, value in results.items():
        number = as_number(value)
        if number is not None:
            points.append(SourcePoint(key, number, 0, ended))
        elif value is not None:
            tags[f"wandb.summary.{key}"] = as_text(value)
    run = SourceRun(
        id=f"{project}/{ident}",
        experiment=project,
        name=str(given.get("name") or ident),
        status=STATES[state],
        started_at=started,
        ended_at=ended if STATES[state].ended else None,
        user=str(given.get("user") or ""),
        params={key: as_text(value) for key, value in flatten(_unwrapped(config))},
        tags=tags,
    )
    return run, points


def row_points(row: Mapping[str, Any], run: SourceRun, notes: SourceNotes) -> Iterator[SourcePoint]:
    """Yield the numbers of a row of history; images, tables and texts are no metrics, and are noted."""
    at = _row_time(row, run)
    logged = dict(flatten({key: value for key, value in row.items() if not key.startswith("_")}))
    for key, value in logged.items():
        number = as_number(value)
        if number is not None:
            yield SourcePoint(key, number, row["_step"], at)
        elif value is not None:
            notes.add("values of histories that are no numbers, and stay behind", f"{run.name} {key}")


def flatten(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield nested values as W&B names them, a.b; what has a `_type`, such as an image, is one value."""
    waiting = list(given.items())[::-1]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict) and value and "_type" not in value:
            waiting += [(f"{key}.{inner}", each) for inner, each in reversed(value.items())]
        else:
            yield key, value


def as_number(value: Any) -> float | None:
    """Return a number, also NaN and infinities as W&B writes them; None for anything else."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return WORDS.get(value) if isinstance(value, str) else None


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _unwrapped(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration; files of older versions have {"lr": {"value": 0.1, "desc": null}}."""
    found = {}
    for key, value in config.items():
        if key.startswith("_"):
            continue
        is_wrapped = isinstance(value, dict) and "value" in value and set(value) <= {"value", "desc"}
        found[key] = value["value"] if is_wrapped else value
    return found


def _required(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InvalidInput.at(name, given=repr(value)[:80], allowed="a text")
    return value


def _object(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name) or {}
    if not isinstance(value, dict):
        raise InvalidInput.at(name, given=type(value).__name__, allowed="an object")
    return value


def _moment(value: Any, name: str) -> datetime | None:
    """Return a moment that is a text or seconds since 1970; one without a zone is in UTC, as W&B has them."""
    if value is None:
        return None
    try:
        if _is_number(value):
            return EPOCH + timedelta(seconds=value)
        found = datetime.fromisoformat(value)
    except (ValueError, TypeError, OverflowError):
        raise InvalidInput.at(
            name, given=repr(value)[:80], allowed="a moment like 2026-05-03T12:00:00Z"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _row_time(row: Mapping[str, Any], run: SourceRun) -> datetime:
    """Return when a row was logged; the same row has the same time whenever it is read."""
    started = run.started_at or EPOCH
    timestamp, runtime = row.get("_timestamp"), row.get("_runtime")
    if _is_number(timestamp):
        return _after(EPOCH, timestamp)
    return _after(started, runtime) if _is_number(runtime) else started


def _after(start: datetime, seconds: float) -> datetime:
    try:
        return start + timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        return start


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
