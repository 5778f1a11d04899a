"""The interface of publishers, and what both of them use: staging paths and the translation of errors."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError

from falaj import errors
from falaj.ports.blobs import BlobKey

STAGING = ".staging"
"""The prefix of incomplete blobs: never listed, and safe to delete once they are old."""


class Publisher(Protocol):
    """Publishes a blob atomically under a free key. Raises AlreadyExists if the key is taken."""

    def publish(self, key: BlobKey, chunks: Iterable[bytes]) -> int: ...


def staging_name() -> str:
    """Return a unique path below the staging prefix."""
    return f"{STAGING}/{secrets.token_hex(16)}"


@contextmanager
def translate_errors(key: BlobKey | str) -> Iterator[None]:
    """Raise the platform's error for an error of obstore or the operating system about `key`."""
    try:
        yield
    except FileNotFoundError as fault:
        if "NoSuchBucket" in str(fault):
            raise errors.Unavailable(f"the blob store is unavailable: {first_paragraph(fault)}") from fault
        raise errors.NotFound(f"blob {key!r} does not exist") from fault
    except AlreadyExistsError as fault:
        raise already_exists(key) from fault
    except (PermissionDeniedError, UnauthenticatedError) as fault:
        raise errors.Unavailable(
            f"the blob store rejected the credentials: {first_paragraph(fault)}"
        ) from fault
    except (BaseError, OSError) as fault:
        raise errors.Unavailable(f"the blob store is unavailable: {first_paragraph(fault)}") from fault


def already_exists(key: BlobKey | str) -> errors.AlreadyExists:
    return errors.AlreadyExists(f"blob {key!r} exists; blobs are never overwritten")


def first_paragraph(fault: Exception) -> str:
    """Return the message on one line, without the debug state that obstore appends."""
    return " ".join(str(fault).partition("\n\nDebug source:")[0].split())[:400]
