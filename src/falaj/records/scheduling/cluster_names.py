"""Names of the platform's objects in a cluster, which allows fewer characters than the platform does."""

from __future__ import annotations

import hashlib
import re

LONGEST_LABEL = 63
HASH_DIGITS = 16
"""64 bits: nobody finds a second name with the same beginning and the same hash."""
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
HASHED = re.compile(rf"(.*-)?[0-9a-f]{{{HASH_DIGITS}}}")


def dns_label(name: str, *, limit: int = LONGEST_LABEL) -> str:
    """Return `name` as a DNS label of at most `limit` characters.

    One that is a label already stays as it is. Others get the hash of the name at the end, and so do labels that look
    as if they had one: two names never become one, whatever they are called.
    """
    if len(name) <= limit and LABEL.fullmatch(name) and not HASHED.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:HASH_DIGITS]
    start = re.sub(r"[^a-z0-9]+", "-", name.lower())[: limit - HASH_DIGITS - 1].strip("-")
    return f"{start}-{digest}".strip("-")


def namespace_of(workspace: str, *, prefix: str) -> str:
    """Return the namespace in which the jobs of a workspace run."""
    return f"{prefix}-{dns_label(workspace, limit=LONGEST_LABEL - len(prefix) - 1)}"
