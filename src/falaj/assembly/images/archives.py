"""Images as files: an OCI layout in a tar that also has what docker load reads, so that every runtime loads it.

`ctr images import`, `podman load` and `docker load` take it. It names the image by its tag and by its digest.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from falaj.errors import Unavailable

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
NAME_ANNOTATION = "io.containerd.image.name"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
REWRITTEN = ("index.json", "manifest.json", "repositories", "oci-layout")


@dataclass(frozen=True)
class ArchivedImage:
    """An image in an archive: the digest of its manifest, and the bytes of its layers."""

    digest: str
    size_bytes: int


def write_layer(target: Path, folder: Path, *, at: str = "", shared: Collection[str] = ()) -> None:
    """Write the files below `folder` as a layer that has them at `at`: owned by root, without times.

    What is in `shared` may be written to by everybody.
    """
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as layer:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            member = layer.gettarinfo(path, arcname=f"{at}{name}")
            member.uid = member.gid = member.mtime = 0
            member.uname = member.gname = ""
            member.mode = layer_mode(path, is_shared=name in shared)
            if member.islnk():  # written once more instead: what it links to may be in another layer
                member.type, member.linkname, member.size = tarfile.REGTYPE, "", path.stat().st_size
            if member.isreg():
                with open(path, "rb") as file:
                    layer.addfile(member, file)
            else:
                layer.addfile(member)


def layer_mode(path: Path, *, is_shared: bool) -> int:
    """Return the mode of a file in an image: everybody may read it, and nobody write it."""
    if is_shared:
        return 0o1777
    mode = path.lstat().st_mode
    return 0o755 if stat.S_ISDIR(mode) or stat.S_ISLNK(mode) or mode & 0o100 else 0o644


def write_image(target: Path, layers: list[Path], config: dict[str, Any], reference: str) -> ArchivedImage:
    """Write an image of `layers`, the lowest first, with `config` as its settings."""
    blobs = dict[str, Path | bytes]()
    described = list[dict[str, Any]]()
    for layer in layers:
        digest = file_digest(layer)
        blobs[digest] = layer
        described.append({"mediaType": LAYER, "digest": f"sha256:{digest}", "size": layer.stat().st_size})
    settings = {
        "architecture": ARCHITECTURES.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [each["digest"] for each in described]},
    }
    data = _json(settings)
    own = {"mediaType": CONFIG, "digest": f"sha256:{_digest(data)}", "size": len(data)}
    manifest = _json({"schemaVersion": 2, "mediaType": MANIFEST, "config": own, "layers": described})
    blobs |= {_digest(data): data, _digest(manifest): manifest}
    with tarfile.open(target, "w") as archive:
        for digest, content in blobs.items():
            _add(archive, f"blobs/sha256/{digest}", content)
        return _add_names(archive, manifest, reference)


def rename_image(source: Path, target: Path, reference: str) -> ArchivedImage:
    """Copy the archive that a builder wrote, with the names by which all runtimes find the image."""
    with tarfile.open(source) as found:
        manifest = _manifest_of(found)
        with tarfile.open(target, "w") as archive:
            for member in found:
                if member.isreg() and member.name.removeprefix("./") not in REWRITTEN:
                    member.name = member.name.removeprefix("./")
                    archive.addfile(member, found.extractfile(member))
            return _add_names(archive, manifest, reference)


def read_image(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of the image in an archive, and the names that it has."""
    with tarfile.open(path) as archive:
        manifest = json.loads(_manifest_of(archive))
        config = json.loads(_blob(archive, manifest["config"]["digest"]))
        names = [each["annotations"][NAME_ANNOTATION] for each in _index(archive)["manifests"]]
    return config, names


def layer_files(path: Path) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Yield the files of an image in an archive, by their layers."""
    with tarfile.open(path) as archive:
        for layer in json.loads(_manifest_of(archive))["layers"]:
            inner = archive.extractfile(_blob_name(layer["digest"]))
            with tarfile.open(fileobj=inner, mode="r:*") as opened:
                for member in opened:
                    yield layer["digest"], member


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_of(archive: tarfile.TarFile) -> bytes:
    """Return the manifest of the one image in an archive."""
    descriptor = _index(archive)["manifests"][0]
    data = _blob(archive, descriptor["digest"])
    if descriptor["mediaType"] == INDEX:  # docker puts one around it
        data = _blob(archive, json.loads(data)["manifests"][0]["digest"])
    return data


def _index(archive: tarfile.TarFile) -> dict[str, Any]:
    try:
        with _file(archive, "index.json") as file:
            found: dict[str, Any] = json.load(file)
            return found
    except KeyError:
        raise Unavailable(
            "the builder wrote an archive without an OCI layout; docker does that before version 25: renew it, or "
            "build with podman or buildah"
        ) from None


def _blob(archive: tarfile.TarFile, digest: str) -> bytes:
    with _file(archive, _blob_name(digest)) as file:
        return file.read()


def _file(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    found = archive.extractfile(name)
    assert found is not None  # noqa: S101 - a plain file
    return found


def _blob_name(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _add_names(archive: tarfile.TarFile, manifest: bytes, reference: str) -> ArchivedImage:
    """Add by which names the image is found: containerd reads them from the index, docker from manifest.json."""
    described, digest = json.loads(manifest), f"sha256:{_digest(manifest)}"
    name, _, tag = reference.rpartition(":")
    descriptor = {"mediaType": MANIFEST, "digest": digest, "size": len(manifest)}
    names = (
        {NAME_ANNOTATION: reference, "org.opencontainers.image.ref.name": tag},
        {NAME_ANNOTATION: f"{name}@{digest}"},
    )
    index = [descriptor | {"annotations": each} for each in names]
    docker = {
        "Config": _blob_name(described["config"]["digest"]),
        "RepoTags": [reference],
        "Layers": [_blob_name(each["digest"]) for each in described["layers"]],
    }
    _add(archive, "index.json", _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": index}))
    _add(archive, "manifest.json", _json([docker]))
    _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    return ArchivedImage(digest, sum(each["size"] for each in described["layers"]))


def _add(archive: tarfile.TarFile, name: str, content: Path | bytes) -> None:
    member = tarfile.TarInfo(name)
    member.mode = 0o644
    if isinstance(content, bytes):
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
        return
    member.size = content.stat().st_size
    with open(content, "rb") as file:
        archive.addfile(member, file)


def _json(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
