"""Write the export of a model version to a folder, and to an archive: verified, and whole or not at all."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import secrets
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falaj.errors import AlreadyExists, Conflict, Damaged, InvalidInput, Unavailable
from falaj.governance.encryption.signing_keys import SigningKey
from falaj.records.registry import (
    MANIFEST_FILE,
    SIGNATURE_FILE,
    ExportedFile,
    ModelExport,
    ModelManifest,
)
from falaj.records.sizes import format_size
from falaj.registry.signing.bundles import verify_bundle

if TYPE_CHECKING:
    from falaj.sdk.platform import Platform

Advance = Callable[[int], None]


def export_model(
    platform: Platform,
    model: str,
    folder: Path,
    *,
    to: str,
    archive: str | Path | None = None,
    force: bool = False,
    advance: Advance = lambda _amount: None,
    **options: Any,
) -> ModelExport:
    """Write a version to `folder`, and to `archive`; `advance` is told of every number of bytes that was written."""
    folder, packed = folder.absolute(), None if archive is None else Path(archive).absolute()
    require_free(folder, force=force)
    if packed is not None:
        _require_archive(packed, force=force)
    made: ModelExport = platform.models.export(model, to=to, **options)  # type: ignore[arg-type]
    verify(made)
    with _out_of_space(folder, made.size_bytes), _draft(folder) as draft, ExitStack() as held:
        for file in made.files:
            _write(draft / file.path, file, _content(platform, made, file), advance)
        _sync_folders(draft)
        part = None if packed is None else held.enter_context(_archive_draft(packed, draft, made))
        _publish(draft, folder, force=force)
        if packed is not None and part is not None:
            part.replace(packed)
            _sync(packed.parent)
    return made


def verify(made: ModelExport) -> None:
    """Raise Damaged unless `model.sig` signs these files, by the key that the export names, and the manifest agrees."""
    texts = {file.path: file.text for file in made.files if file.text is not None}
    try:
        key = SigningKey.from_pem(made.public_key)
        signature, manifest = texts[SIGNATURE_FILE], ModelManifest.model_validate_json(texts[MANIFEST_FILE])
    except (ValueError, KeyError):
        raise Damaged(f"the export of {made.version} has no key, signature or manifest") from None
    if key.fingerprint != made.fingerprint:
        raise Damaged(f"the export of {made.version} has another key than it says")
    named = {key.fingerprint: key.public_key}
    signed = verify_bundle(signature, named.get, where=f"the export of {made.version}")
    if signed.digests != {file.path: file.sha256 for file in made.files if file.path != SIGNATURE_FILE}:
        raise Damaged(f"the export of {made.version} has other files than were signed")
    if any(file.text is not None and _sha256(file.text) != file.sha256 for file in made.files):
        raise Damaged(f"the export of {made.version} has a text that is not the one that was signed")
    registered = {file.path: (file.size_bytes, file.sha256) for file in manifest.files}
    for file in made.files:
        if file.source is not None and registered.get(file.source) != (file.size_bytes, file.sha256):
            raise Damaged(f"{file.path} of the export differs from {file.source} in the signed manifest")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def require_free(folder: Path, *, force: bool) -> None:
    """Raise AlreadyExists unless the folder is absent or empty, or `force` replaces an earlier export there."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InvalidInput.at("DIR", given=str(folder), allowed="a folder, or a name that is free")
    if not folder.parent.is_dir() or not os.access(folder.parent, os.W_OK | os.X_OK):
        raise InvalidInput.at("DIR", given=str(folder), allowed="a name in a folder that can be written")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        raise AlreadyExists(f"{folder} is not empty; name another folder, or replace an export by --force")
    if not (folder / SIGNATURE_FILE).is_file():
        raise AlreadyExists(
            f"{folder} has no {SIGNATURE_FILE}: --force replaces earlier exports, and no other folder"
        )


def _require_archive(archive: Path, *, force: bool) -> None:
    if not archive.name.endswith((".tar.gz", ".tgz")):
        raise InvalidInput.at(
            "--archive", given=str(archive), allowed="a name that ends with .tar.gz or .tgz"
        )
    if not archive.parent.is_dir():
        raise InvalidInput.at("--archive", given=str(archive), allowed="a name in a folder that exists")
    if archive.exists() and not (force and archive.is_file()):
        raise AlreadyExists(f"{archive} exists; --force replaces it")


def _content(platform: Platform, made: ModelExport, file: ExportedFile) -> Iterator[bytes]:
    if file.text is not None:
        return iter([file.text.encode()])
    # By id: an alias may point elsewhere by now.
    return iter(platform.models.read(made.id, str(file.source)))


def _write(path: Path, file: ExportedFile, content: Iterator[bytes], advance: Advance) -> None:
    """Write a file chunk by chunk. Raise Damaged if its bytes are not those that were announced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, size_bytes = hashlib.sha256(), 0
    with open(path, "xb") as target:
        for chunk in content:
            target.write(chunk)
            digest.update(chunk)
            size_bytes += len(chunk)
            advance(len(chunk))
        target.flush()
        os.fsync(target.fileno())
    if (size_bytes, digest.hexdigest()) != (file.size_bytes, file.sha256):
        raise Damaged(f"{file.path}: its bytes are not those that were signed")


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """Yield a folder beside `folder`, which is removed unless it was renamed."""
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    draft.mkdir()
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _out_of_space(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn a lack of disk space into an error that says how much is needed, before the first byte or at any."""
    free = shutil.disk_usage(folder.parent).free
    words = f"{folder.parent} has too little space: the export takes {format_size(needed_bytes)}"
    if free < needed_bytes:
        raise Unavailable(f"{words}, and {format_size(free)} are free; nothing was written")
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Unavailable(f"{words}; nothing was written") from None


def _publish(draft: Path, folder: Path, *, force: bool) -> None:
    """Rename the draft to `folder`. Of two at once one succeeds, or with `force` the last; the other is told."""
    old = draft.with_suffix(".old")
    try:
        try:
            os.rename(draft, folder)  # also onto an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            require_free(folder, force=force)
            os.rename(folder, old)
            try:
                os.rename(draft, folder)
            except OSError:
                _put_back(old, folder)
                raise
    except OSError as error:
        raise Conflict(f"{folder} was changed by another while this export ran: {error.strerror}") from None
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _put_back(old: Path, folder: Path) -> None:
    """Rename what was there back; another export that has taken its place replaces it."""
    try:
        os.rename(old, folder)
    except OSError:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _archive_draft(archive: Path, draft: Path, made: ModelExport) -> Iterator[Path]:
    """Yield a tar archive beside `archive`, removed unless it was renamed.

    Its bytes depend on nothing but those of the files: order, owners, modes and times are fixed.
    """
    part = archive.with_name(f".{archive.name}.{secrets.token_hex(4)}.part")
    top = made.version.replace("@", "-")
    try:
        with open(part, "xb") as raw:
            with (
                gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as compressed,
                tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
            ):
                for file in sorted(made.files, key=lambda each: each.path):
                    entry = tarfile.TarInfo(f"{top}/{file.path}")
                    entry.size, entry.mode = file.size_bytes, 0o644
                    with open(draft / file.path, "rb") as content:
                        tar.addfile(entry, content)
            raw.flush()
            os.fsync(raw.fileno())
        yield part
    finally:
        part.unlink(missing_ok=True)


def _sync_folders(root: Path) -> None:
    for folder, _folders, _names in os.walk(root):
        _sync(Path(folder))


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
