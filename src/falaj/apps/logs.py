"""Logs as JSON lines, without secrets."""

from __future__ import annotations

import json
import logging
import logging.handlers
import re
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SECRET = re.compile(
    r"fj_[A-Za-z0-9_]+\.[A-Za-z0-9_-]+|(?<=[Bb]earer )[^\s\"\\]+|(?<=code=)[\w-]+"
    r"|(?<=password=)[^\s\"\\]+|(?<=://)[^/@\s:\"]*:[^/@\s\"]+(?=@)"
)
"""Stops at quotes and backslashes, so that a redacted line is still valid JSON."""
SIGNS = ("fj_", "earer ", "code=", "password=", "://")
"""A text without any of these has no secret: to look for them takes a fraction of the time."""
STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}
LOG_BYTES = 20 * 2**20
TELL_AGAIN_S = 60.0


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object, with secrets redacted."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in STANDARD_FIELDS}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return redact(_encode(line))


_encode = json.JSONEncoder(default=str).encode


def redact(text: str) -> str:
    """Return `text` with its secrets redacted."""
    return SECRET.sub("***", text) if any(sign in text for sign in SIGNS) else text


class RotatingLog(logging.handlers.RotatingFileHandler):
    """A rotating file. Lines that cannot be written, as on a full disk, are lost, which is said now and then."""

    _told_at = float("-inf")

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802 - the name of the standard library
        """Tell whether the file is full; by its size alone, without a look at its path for each line."""
        return self.stream is not None and self.stream.tell() >= self.maxBytes

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name of the standard library
        if time.monotonic() - self._told_at < TELL_AGAIN_S:
            return
        self._told_at = time.monotonic()
        with suppress(OSError, ValueError):
            print(
                f"warning: lines of {self.baseFilename} are lost: {sys.exc_info()[1]}",
                file=sys.stderr,
                flush=True,
            )


def log_to(path: Path | None) -> None:
    """Send every log of this process to a rotating file, or to standard error."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if path is not None:
        handler = RotatingLog(path, maxBytes=LOG_BYTES, backupCount=5)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging._srcfile = None  # no line has the caller's file, which takes longer to find than all the rest
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for verbose in ("uvicorn.access", "httpx", "alembic", "dbos"):
        logging.getLogger(verbose).setLevel(logging.WARNING)
