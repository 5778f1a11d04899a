"""The unfinished output of a batch prediction in the checkpoints of its job: the next attempt goes on from there.

Each checkpoint has what was added since the one before, so that nothing is stored twice: a piece of the growing file as
parts, and the lines of its journal in the manifest. One that begins at the first byte replaces all others. See decision
0054.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from falaj.serving.runtime.batch_prediction.partial_output import DATA, JOURNAL, CountedOutput
from falaj.training.runtime.checkpointing.storage.store import (
    MAX_KEPT,
    MAX_PARTS,
    CheckpointStore,
    Retention,
    SaveId,
)
from falaj.training.runtime.errors import CheckpointDamaged, TrainingError

FORMAT = 1
SAVE_S = 5.0
SAVE_SHARE = 20
"""A checkpoint is saved after so many seconds, or so many times what the last one took."""
MOST_SAVES = 64
"""A run saves after each part of its rows of this size at most: together they stay below MAX_KEPT."""
PART_BYTES = 64 << 20
READ_BYTES = 16 << 20
NOTHING = CountedOutput(0, 0, 0)


class _Increment(NamedTuple):
    """The manifest of a checkpoint: from where to where it leads, its parts, and the lines of the journal."""

    start: CountedOutput
    end: CountedOutput
    parts: tuple[tuple[int, str], ...]
    journal: str

    def encoded(self) -> bytes:
        body = {"format": FORMAT, **self._asdict()}
        text = json.dumps(body).encode()
        return hashlib.sha256(text).hexdigest().encode() + b" " + text


class JobCheckpoints:
    """Keeps the output of an attempt at a job, and restores that of the attempts before. Stops at SIGTERM."""

    def __init__(self, store: CheckpointStore, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._kept = NOTHING
        self._saved_at = time.monotonic()
        self._took_s = 0.0
        self._is_stopping = False

    def restore(self) -> int:
        """Write what the checkpoints hold to the folder; return its rows. What is damaged is predicted again."""
        found = NOTHING
        with open(self._folder / DATA, "wb") as data, open(self._folder / JOURNAL, "wb") as journal:
            for step in sorted(self._store.steps()):
                try:
                    following = self._increment(step)
                    if following.start not in (found, NOTHING):
                        raise CheckpointDamaged(
                            f"it begins behind row {following.start.rows}, not {found.rows}"
                        )
                    data.seek(following.start.data_bytes)
                    self._copy_parts(step, following, data)
                    journal.seek(following.start.journal_bytes)
                    journal.write(following.journal.encode())
                    found = self._kept = following.end
                except CheckpointDamaged as error:
                    print(f"the checkpoint of row {step} is not used: {error}", file=sys.stderr, flush=True)
                    self._kept = NOTHING  # the next one replaces all
                    break
            data.truncate(found.data_bytes)
            journal.truncate(found.journal_bytes)
        return found.rows

    def stop_at_sigterm(self) -> None:
        """Let the run end when the platform asks for that, to make room or to move the job."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_is_stopping", True))

    def is_stopping(self) -> bool:
        return self._is_stopping

    def begin(self, rows: int) -> None:
        if rows != self._kept.rows:
            self._kept = NOTHING

    def offer(self, counted: CountedOutput, *, total: int) -> None:
        is_time = time.monotonic() - self._saved_at >= max(SAVE_S, SAVE_SHARE * self._took_s)
        if is_time and counted.rows - self._kept.rows >= total // MOST_SAVES:
            self.keep(counted)

    def keep(self, counted: CountedOutput) -> None:
        """Save what was added since the last checkpoint. A failure is said in the log, and tried again later."""
        if counted.rows == self._kept.rows:
            return
        began = time.monotonic()
        try:
            self._save(counted)
        except (TrainingError, OSError) as error:
            print(f"the progress could not be saved: {error}", file=sys.stderr, flush=True)
        self._saved_at = time.monotonic()
        self._took_s = self._saved_at - began

    def finish(self) -> None:
        """Remove the checkpoints of an output that is complete; if that fails, they stay until the job is deleted."""
        try:
            self._commit(
                SaveId(self._kept.rows + 1, secrets.token_hex(16)), _Increment(NOTHING, NOTHING, (), ""), 1
            )
        except (TrainingError, OSError) as error:
            print(f"the saved progress could not be removed: {error}", file=sys.stderr, flush=True)

    def _save(self, counted: CountedOutput) -> None:
        start = self._kept if len(self._store.steps()) < MAX_KEPT - 1 else NOTHING
        save = SaveId(counted.rows, secrets.token_hex(16))
        parts: list[tuple[int, str]] = []
        size = counted.data_bytes - start.data_bytes
        part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
        with open(self._folder / DATA, "rb") as data:
            data.seek(start.data_bytes)
            while size > 0:
                piece = data.read(min(size, part_bytes))
                self._store.save_part(save, len(parts), [piece])
                parts.append((len(piece), hashlib.sha256(piece).hexdigest()))
                size -= len(piece)
        with open(self._folder / JOURNAL, "rb") as journal:
            journal.seek(start.journal_bytes)
            lines = journal.read(counted.journal_bytes - start.journal_bytes).decode()
        self._commit(
            save, _Increment(start, counted, tuple(parts), lines), 1 if start == NOTHING else MAX_KEPT
        )
        self._kept = counted

    def _commit(self, save: SaveId, increment: _Increment, kept: int) -> None:
        sizes = [size for size, _ in increment.parts]
        self._store.commit(save, sizes, increment.encoded(), Retention(kept))

    def _increment(self, step: int) -> _Increment:
        digest, _, text = self._store.load_manifest(step).partition(b" ")
        if digest != hashlib.sha256(text).hexdigest().encode():
            raise CheckpointDamaged("its manifest is truncated or altered")
        found: dict[str, Any] = json.loads(text)
        if found.pop("format") != FORMAT:
            raise CheckpointDamaged("another version of Falaj wrote it")
        start, end = CountedOutput(*found["start"]), CountedOutput(*found["end"])
        parts = tuple((int(size), str(digest)) for size, digest in found["parts"])
        return _Increment(start, end, parts, found["journal"])

    def _copy_parts(self, step: int, increment: _Increment, data: Any) -> None:
        for number, (size, sha256) in enumerate(increment.parts):
            digest, at = hashlib.sha256(), 0
            while at < size:
                piece = self._store.load_part(step, number, offset=at, length=min(READ_BYTES, size - at))
                if not piece:
                    break
                digest.update(piece)
                data.write(piece)
                at += len(piece)
            if digest.hexdigest() != sha256:
                raise CheckpointDamaged(f"part {number} is not what was saved")
