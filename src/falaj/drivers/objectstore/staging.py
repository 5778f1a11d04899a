"""Where a blob lies before it is whole: apart from all blobs, never listed, and safe to remove when it is old."""

from __future__ import annotations

import secrets

STAGING = ".staging"


def staging_name() -> str:
    """A name that nobody else uses."""
    return f"{STAGING}/{secrets.token_hex(16)}"
