"""Files of an attempt appear whole, once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from falaj.drivers.processes.attempt_folder import create_marker, read_json


def test_a_marker_is_created_once(tmp_path: Path) -> None:
    create_marker(tmp_path / "started", "first")

    with pytest.raises(FileExistsError):
        create_marker(tmp_path / "started", "second")

    assert (tmp_path / "started").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["started"]


def test_a_reader_never_sees_a_marker_in_part(tmp_path: Path) -> None:
    stop, seen = threading.Event(), set[bool]()

    def read() -> None:
        while not stop.is_set():
            for path in tmp_path.glob("*.json"):
                seen.add(read_json(path) == {"pod": "p"})  # JSONDecodeError if it is in part

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        create_marker(tmp_path / f"{number}.json", '{"pod": "p"}')
    stop.set()
    reader.join()

    assert seen == {True}
