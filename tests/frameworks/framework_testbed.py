"""A platform that trains the examples of the frameworks as jobs, and the results of a job."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import falaj as fj
from falaj.records.training.jobs import Job, JobState

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
TIMEOUT_S = 600


@dataclass(frozen=True)
class Trained:
    """A job that has ended, and the result of each of its ranks."""

    job: Job
    ranks: list[dict[str, Any]]
    log: str
    packages: str
    logged: dict[str, int]


class FrameworkTestbed:
    """A platform for this test."""

    def __init__(self, platform: fj.Platform, folder: Path) -> None:
        self.platform, self.folder = platform, folder

    def submit(self, example: str, **options: Any) -> Job:
        code = self.folder / "code"
        code.mkdir(exist_ok=True)
        shutil.copy(EXAMPLES / example, code)
        limits = {"timeout": f"PT{TIMEOUT_S}S", "cpus": 2}
        return self.platform.train(code / example, **{**limits, **options})

    def end(self, job: Job) -> Trained:
        ended = list(self.platform.jobs.wait(job.id))[-1]
        log = b"".join(self.platform.jobs.logs(job.id)).decode(errors="replace")
        assert ended.state is JobState.DONE, f"{ended.reason}\n{log[-6000:]}"
        outputs = sorted(ended.outputs, key=lambda each: each.path)
        ranks = [json.loads(self._read(each.blob)) for each in outputs]
        details = self.platform.runs.show(job.run)
        notes = next(each for each in details.artifacts if each.path == "environment.txt")
        logged = {each.key: each.points for each in details.metrics}
        return Trained(ended, ranks, log, self._read(notes.blob).decode(), logged)

    def train(self, example: str, **options: Any) -> Trained:
        return self.end(self.submit(example, **options))

    def _read(self, blob: str) -> bytes:
        return b"".join(self.platform.blobs.read(blob))
