"""A process that the tests start on a home, and kill in the middle of its work."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from falaj.assembly.home import open_home
from falaj.assembly.platform import LocalPlatform, assemble


def create_workspaces(platform: LocalPlatform, name: str) -> None:
    """Create workspaces forever; print a line for each."""
    for number in range(1_000_000):
        platform.services.workspaces.create(f"{name}-{number}")
        say(f"{number}")


def stop_before_commit(platform: LocalPlatform, name: str) -> None:
    """Upload a blob, and stop when its bytes are stored and its row is not."""
    platform.gate.commit = stop  # type: ignore[method-assign,assignment]
    platform.services.blobs.upload(iter([name.encode()]))


def stop_half_way(platform: LocalPlatform, name: str) -> None:
    """Upload a blob, and stop when some of its bytes are written."""

    def data() -> Iterator[bytes]:
        for _ in range(6):
            yield bytes(1 << 20)
        stop()

    platform.services.blobs.upload(data())


def stop_while_registering(platform: LocalPlatform, run: str) -> None:
    """Register the files of a run, and stop when the version is written and not committed."""
    models: Any = platform.services.models
    add = models._versions.add

    def add_and_stop(*given: Any, **options: Any) -> None:
        add(*given, **options)
        stop()

    models._versions.add = add_and_stop
    models.register_artifacts("churn", source=run, folder="model")


def read_often(platform: LocalPlatform, name: str) -> None:
    """Read a blob repeatedly; print the outcome of each read."""
    while True:
        try:
            say(f"read {len(b''.join(platform.services.blobs.read(name)))}")
        except Exception as error:
            say(type(error).__name__)


def stop(*_: Any) -> None:
    say("stopped")
    threading.Event().wait()


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    folder, what, name = sys.argv[1:]
    opened = assemble(open_home(Path(folder) / "home", Path(folder) / "config"), as_owner=True)
    globals()[what](opened, name)
