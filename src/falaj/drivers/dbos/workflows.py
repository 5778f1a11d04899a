"""Workflows on dbos, with a database of its own, JSON instead of pickle, and one fixed executor id."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sqlalchemy as sa
from dbos import DBOS, DBOSConfig, Serializer, SetWorkflowID

from falaj.errors import FalajError, rebuild
from falaj.ports.workflows import JsonObject, WorkflowBody, WorkflowOutcome

log = logging.getLogger("falaj.workflows")

EXECUTOR = "controller"
VERSION = "1"
"""Fixed: dbos resumes only workflows of its own executor and version."""

ENTRY = "falaj"
SCHEMA = "falaj_dbos"
"""The schema in a PostgreSQL database."""

KNOWS_SUBSECONDS = (3, 42)
"""The first SQLite whose own `unixepoch('subsec')` is not NULL."""


class DbosWorkflows:
    """The dbos runtime of this process. `url` is a SQLite file, or a PostgreSQL database in which it has a schema."""

    def __init__(self, url: str, *, schema: str = SCHEMA) -> None:
        config: DBOSConfig = {
            "name": "falaj",
            "application_version": VERSION,
            "executor_id": EXECUTOR,
            "dbos_system_schema": schema,
            "serializer": JsonSerializer(),
            "log_level": "CRITICAL",  # failures are logged here and reported by `outcome`
            "notification_listener_polling_interval_sec": 0.2,
            "system_database_url": url,
            "use_listen_notify": False,
        }
        self._engine: sa.Engine | None = None
        if url.startswith("sqlite"):
            _create_database(Path(url.removeprefix("sqlite:///")))
            config["system_database_engine"] = self._engine = _wal_engine(url)
        _drop_closed_handlers()
        self._bodies: dict[str, WorkflowBody] = {}
        self._dbos = DBOS(config=config)

        @DBOS.workflow(name=ENTRY)
        def entry(
            name: str, inputs: JsonObject
        ) -> JsonObject:  # dbos marks the function, which it cannot do to a method
            return self._run(name, inputs)

        self._entry: Callable[[str, JsonObject], JsonObject] = entry

    def launch(self, bodies: dict[str, WorkflowBody]) -> None:
        self._bodies = dict(bodies)
        DBOS.launch()

    def start(self, workflow_id: str, name: str, inputs: JsonObject) -> None:
        with SetWorkflowID(workflow_id):
            DBOS.start_workflow(self._entry, name, inputs)

    def outcome(self, workflow_id: str) -> WorkflowOutcome | None:
        status = DBOS.get_workflow_status(workflow_id)
        if status is None:
            return None
        if status.status == "SUCCESS":
            output: JsonObject = status.output or {}
            return WorkflowOutcome(result=output.get("result"), error=output.get("error"))
        if status.status == "CANCELLED":
            return WorkflowOutcome(result=None, error="cancelled", cancelled=True)
        if status.status in ("ERROR", "MAX_RECOVERY_ATTEMPTS_EXCEEDED"):
            return WorkflowOutcome(result=None, error=str(status.error or status.status))
        return None

    def cancel(self, workflow_id: str) -> None:
        DBOS.cancel_workflow(workflow_id)

    def close(self) -> None:
        DBOS.destroy(destroy_registry=True)
        if self._engine is not None:
            self._engine.dispose()

    def _run(self, name: str, inputs: JsonObject) -> JsonObject:
        """Run a workflow and return its result or error. A FalajError is an outcome, not a failure of the engine."""
        body = self._bodies.get(name)
        if body is None:
            return {"result": None, "error": f"this controller has no workflow {name!r}"}
        try:
            return {"result": body(_DbosSteps(str(DBOS.workflow_id)), inputs), "error": None}
        except FalajError as error:
            return {"result": None, "error": error.message}
        except Exception:
            log.exception("workflow failed", extra={"workflow": name})
            raise


def _drop_closed_handlers() -> None:
    """Remove log handlers with closed streams, which dbos would flush."""
    dbos_log = logging.getLogger("dbos")
    for handler in list(dbos_log.handlers):
        if getattr(getattr(handler, "stream", None), "closed", False):
            dbos_log.removeHandler(handler)


class _DbosSteps:
    def __init__(self, workflow: str) -> None:
        self._workflow = workflow

    @property
    def workflow(self) -> str:
        return self._workflow

    def run(self, name: str, body: Callable[[], JsonObject]) -> JsonObject:
        return DBOS.run_step({"name": name}, body)


class JsonSerializer(Serializer):
    """Serialises inputs, results and errors as JSON. A FalajError is restored with its type."""

    def name(self) -> str:
        return "falaj_json"

    def serialize(self, data: Any) -> str:
        return json.dumps(data, default=_encode_exception)

    def deserialize(self, serialized_data: str) -> Any:
        return json.loads(serialized_data, object_hook=_decode_exception)


def _encode_exception(value: Any) -> Any:
    if isinstance(value, FalajError):
        faults = [fault.model_dump() for fault in value.faults]
        return {"__error__": [value.code, value.message, faults, value.details]}
    if isinstance(value, BaseException):
        return {"__error__": ["internal", f"{type(value).__name__}: {value}", [], {}]}
    raise TypeError(f"a workflow stores JSON only, not {type(value).__name__}")


def _decode_exception(value: dict[str, Any]) -> Any:
    if set(value) == {"__error__"}:
        return rebuild(*value["__error__"])
    return value


def create_schema(url: str, *, schema: str = SCHEMA) -> None:
    """Create the tables of workflows in a PostgreSQL database."""
    DBOS.migrate(url, schema=schema)


def _create_database(path: Path) -> None:
    """Create the database under a temporary name, so that an interrupted migration leaves no partial database."""
    if path.exists():
        return
    with TemporaryDirectory(dir=path.parent, prefix="workflows-") as folder:
        draft = Path(folder) / "new.db"
        DBOS.migrate(f"sqlite:///{draft}")
        os.replace(draft, path)


def _wal_engine(url: str) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"check_same_thread": False, "timeout": 30})

    @sa.event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        if sqlite3.sqlite_version_info < KNOWS_SUBSECONDS:
            connection.create_function("unixepoch", 1, _read_clock)

    return engine


def _read_clock(unit: str) -> float:
    """Return what `unixepoch('subsec')` does, the only form that dbos uses: see decision 0068."""
    if unit != "subsec":
        raise ValueError(f"unixepoch({unit!r}) is not known here")
    return time.time()
