"""The built-in workflows: each step is one operation, performed for whoever asked for the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from falaj.control.platform import Rooms
from falaj.ports.workflows import Json, Steps

Workflow = Callable[[Rooms, Steps, Json], Json]


def copy_blob(rooms: Rooms, steps: Steps, given: Json) -> Json:
    """Copy a blob into another zone, under a name."""

    def upload() -> Json:
        data = rooms.blob.read(given["blob"])
        staged = rooms.blob.upload(
            data, workspace=given["workspace"], zone=given["zone"], sources=(given["blob"],)
        )
        return {"blob": staged.id}

    def commit() -> Json:
        return _dump(rooms.blob.commit(staged["blob"], name=given["name"]))

    staged = steps.run("upload", upload)
    return steps.run("commit", commit)


WORKFLOWS: dict[str, Workflow] = {"blob.copy": copy_blob}


def _dump(record: Any) -> Json:
    dumped: Json = record.model_dump(mode="json")
    return dumped
