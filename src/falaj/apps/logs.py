"""Logs as JSON lines, without secrets."""

from __future__ import annotations

import json
import logging
import logging.handlers
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SECRET = re.compile(
    r"fj_[A-Za-z0-9_]+\.[A-Za-z0-9_-]+|(?<=[Bb]earer )[^\s\"\\]+|(?<=code=)[\w-]+"
    r"|(?<=password=)[^\s\"\\]+|(?<=://)[^/@\s:\"]*:[^/@\s\"]+(?=@)"
)
"""Stops at quotes and backslashes, so that a redacted line is still valid JSON."""
STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}
LOG_BYTES = 20 * 2**20


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
        return redact(json.dumps(line, default=str))


def redact(text: str) -> str:
    """Return `text` with its secrets redacted."""
    return SECRET.sub("***", text)


def log_to(path: Path | None) -> None:
    """Send every log of this process to a rotating file, or to standard error."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if path is not None:
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=5)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for verbose in ("uvicorn.access", "httpx", "alembic", "dbos"):
        logging.getLogger(verbose).setLevel(logging.WARNING)
