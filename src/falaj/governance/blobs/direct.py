"""Blobs that a worker encrypts and uploads to the store itself, with an address and a key for that one blob.

The key is the subkey of the blob (see `encryption.frames`): it opens no other blob, and the data key of the workspace
stays with the platform. What was uploaded is staged until the platform has read it and found what was announced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from falaj.governance.encryption.frames import SealingKey
from falaj.ports.blobs import BlobKey, UploadAddress
from falaj.records.names import ObjectId


@dataclass(frozen=True)
class UploadGrant:
    """What is needed to upload one blob: its id and key, where to put its encrypted bytes, and how to make them."""

    ident: ObjectId
    key: BlobKey
    zone: str
    address: UploadAddress = field(repr=False)
    sealing: SealingKey = field(repr=False)


@dataclass(frozen=True)
class StagedUpload(Iterator[bytes]):
    """What was uploaded by a grant, in place of the bytes of an upload: so many, with this hash."""

    grant: UploadGrant
    size_bytes: int
    sha256: str

    def __next__(self) -> NoReturn:
        raise RuntimeError("the bytes are in the store")
