"""What goes wrong in a store, in the words of the platform."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError

from falaj import errors
from falaj.ports.blobs import BlobKey


@contextmanager
def translate_errors(key: BlobKey | str) -> Iterator[None]:
    """Raises the platform's error for what obstore or the operating system says about `key`."""
    try:
        yield
    except FileNotFoundError as fault:
        if "NoSuchBucket" in str(fault):
            raise errors.Unavailable(f"the blob store does not answer: {first_paragraph(fault)}") from fault
        raise errors.NotFound(f"there is no blob {key!r}") from fault
    except AlreadyExistsError as fault:
        raise already_exists(key) from fault
    except (PermissionDeniedError, UnauthenticatedError) as fault:
        raise errors.Unavailable(
            f"the blob store refuses our credentials: {first_paragraph(fault)}"
        ) from fault
    except (BaseError, OSError) as fault:
        raise errors.Unavailable(f"the blob store does not answer: {first_paragraph(fault)}") from fault


def already_exists(key: BlobKey | str) -> errors.AlreadyExists:
    return errors.AlreadyExists(f"blob {key!r} is already there; blobs are never overwritten")


def first_paragraph(fault: Exception) -> str:
    """What happened, on one line, without the pages of its own state that obstore appends."""
    return " ".join(str(fault).partition("\n\nDebug source:")[0].split())[:400]
