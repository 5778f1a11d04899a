"""The platform as a worker sees it: the calls of decision 0034, each repeated until it is answered."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from falaj.training.runtime.agent.protocol import SocketAgent

FETCH_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class WorkerClient:
    """The connection of one worker: node `node_rank` of an attempt, in the pod with this uid."""

    agent: SocketAgent
    node_rank: int
    pod: str

    @classmethod
    def connect(cls, address: str, node_rank: int, pod: str, *, patience_s: float) -> WorkerClient:
        return cls(SocketAgent.connect(address, patience_s=patience_s), node_rank, pod)

    def claim(self) -> float:
        """Claim the node, and return the time of the platform's clock."""
        found, _ = self._call("claim")
        return float(found["now"])

    def launch(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return what to run, and its secrets."""
        found, _ = self._call("launch")
        return found["launch"], found["secrets"]

    def fetch_all(self, target: Path) -> None:
        """Fetch code and inputs into `target`; what is there already is not fetched again."""
        _, listed = self.agent.call("files")
        for each in json.loads(listed):
            self._fetch(each, target / safe_path(each["path"]))

    def append_log(self, offset: int, data: bytes) -> int:
        """Return the length of the log on the platform."""
        length, _ = self._call("append_log", [data], offset=offset)
        return int(length)

    def save_output(self, path: str, file: Path) -> None:
        self._call("save_output", FileBody(file), path=path, sha256=file_hash(file))

    def save_packages(self, listed: str) -> None:
        self._call("save_packages", [listed.encode()])

    def renew(self) -> tuple[float, float | None]:
        """Return how long the lease lasts, and within what time to stop; none to go on."""
        order, _ = self._call("renew")
        stop = order["stop_grace_s"]
        return float(order["lease_s"]), None if stop is None else float(stop)

    def report_end(self, result: dict[str, Any]) -> None:
        self._call("ended", result=result)

    def _fetch(self, listed: dict[str, Any], target: Path) -> None:
        if target.exists() and file_hash(target) == listed["sha256"]:
            return
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name[:200]}.part")
        with open(draft, "wb") as file:
            while (offset := file.tell()) < listed["size"]:
                asked = {"path": listed["path"], "offset": offset, "length": FETCH_BYTES}
                _, data = self.agent.call("fetch", **asked)
                if not data:
                    break
                file.write(data)
        if draft.stat().st_size != listed["size"] or file_hash(draft) != listed["sha256"]:
            raise ValueError(f"{listed['path']} is not what the platform announced")
        draft.chmod(0o600 | (listed["mode"] & 0o100))
        os.replace(draft, target)

    def _call(self, name: str, body: Iterable[bytes] = (), **values: Any) -> tuple[Any, bytearray]:
        return self.agent.call(name, body, node_rank=self.node_rank, pod=self.pod, **values)


class FileBody:
    """The bytes of a file as the parts of a frame: read anew whenever the frame is sent again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        with open(self._path, "rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece


def safe_path(path: str) -> Path:
    """Return a path of the platform's list, which must stay below the folder that it is for."""
    found = Path(path)
    if found.is_absolute() or ".." in found.parts:
        raise ValueError(f"the platform lists {path!r}")
    return found


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def output_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the regular files below `folder`, with their paths in it. Links are not followed.

    OSError if a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    for above, folders, files in os.walk(folder, onerror=fail):
        folders.sort()
        for name in sorted(files):
            path = Path(above) / name
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(folder).as_posix(), path
