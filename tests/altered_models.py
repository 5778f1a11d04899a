"""Alters what is stored of model versions, as someone would who can write the disk or the database, and has no key."""

from __future__ import annotations

import json
from pathlib import Path

from falaj.sdk.platform import Platform
from platforms import OwnPlatform


def stored_file(home: Path, blob: str) -> Path:
    """Return the file that has the encrypted bytes of a blob."""
    (found,) = home.rglob(blob)
    return found


def flip_byte(platform: Platform, version: str, home: Path) -> None:
    """Alter one byte in the middle of what is stored of the first file of a version."""
    (file, *_) = platform.models.version(version).files
    stored = stored_file(home, file.blob)
    content = bytearray(stored.read_bytes())
    content[len(content) // 2] ^= 1
    stored.write_bytes(content)


def change_hash(platform: OwnPlatform, version: str) -> None:
    """Alter the hash of a blob of a version in the row of the blob."""
    (file, *_) = platform.models.version(version).files
    wrong = "0" * 64 if file.sha256[0] != "0" else "1" * 64
    platform.sql(
        "UPDATE governance_blobs SET sha256 = :wrong WHERE id = :id", {"wrong": wrong, "id": file.blob}
    )


def change_manifest(platform: OwnPlatform, version: str) -> None:
    """Alter the hash of a file in the stored manifest of a version."""
    found = platform.models.version(version)
    (text,) = platform.rows_of(f"SELECT manifest FROM registry_versions WHERE id = '{found.id}'")
    manifest = json.loads(text)
    manifest["files"][0]["sha256"] = "0" * 64
    changed = {"text": json.dumps(manifest, sort_keys=True, separators=(",", ":")), "id": found.id}
    platform.sql("UPDATE registry_versions SET manifest = :text WHERE id = :id", changed)


def change_signature(platform: OwnPlatform, version: str) -> None:
    """Alter the stored signature of a version, which stays well-formed."""
    found = platform.models.version(version)
    bundle = json.loads(found.signature)
    signed = bundle["dsseEnvelope"]["signatures"][0]
    signed["sig"] = signed["sig"][:20] + ("A" if signed["sig"][20] != "A" else "B") + signed["sig"][21:]
    changed = {"text": json.dumps(bundle), "id": found.id}
    platform.sql("UPDATE registry_versions SET signature = :text WHERE id = :id", changed)
