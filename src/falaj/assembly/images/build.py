"""Builds an image: checks the request, writes its context, builds it, and records the result in the home."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from falaj.assembly.images.archives import ArchivedImage, write_image
from falaj.assembly.images.builders import ContainerBuilder, choose_builder
from falaj.assembly.images.context import BuildContext, write_context
from falaj.assembly.images.debian import debian_suite, make_rootfs, require_mmdebstrap
from falaj.assembly.images.kinds import DEBIAN, RECIPES, ImageSettings, python_version, render_dockerfile
from falaj.assembly.images.lock import read_lock
from falaj.assembly.images.programs import Report
from falaj.assembly.images.virtualenv_layer import write_packages
from falaj.drivers.fsync import sync_file
from falaj.errors import AlreadyExists, InvalidInput, Unavailable
from falaj.records.record import utc_now
from falaj.records.sizes import format_size
from falaj.records.training.images import BaseImage, ImageBuild, ImageKind, TaggedImage
from falaj.version import VERSION


class MakeBase(Protocol):
    """Writes a base to a tar file, and returns the packages in it."""

    def __call__(self, target: Path, *, mirror: str | None, report: Report) -> tuple[str, ...]: ...


FOLDER = "images"
"""The folder of a home with one file for each image that was built."""
DRAFT = ".falaj-image-"
"""How the names of folders begin in which images are built."""


@dataclass(frozen=True)
class ImageRequest:
    """An image to build. `environment` is a locked requirements file that it has besides; `bare` leaves torch out.

    `base` is `debian` or an image; `mirror` the Debian mirror for the former. The image goes to the file `output`, or
    is pushed to the registry of its name, or stays with the builder.
    """

    kind: ImageKind
    base: str = DEBIAN
    mirror: str | None = None
    environment: Path | None = None
    bare: bool = False
    tag: str | None = None
    builder: str = "auto"
    output: Path | None = None
    push: bool = False

    def with_result(self, *, tag: str | None, builder: str, output: Path | None, push: bool) -> ImageRequest:
        return replace(self, tag=tag, builder=builder, output=output, push=push)

    @property
    def reference(self) -> str:
        """The name of the image; by default one on no registry."""
        added = f"-{slug(self.environment.stem)}" if self.environment is not None else "-bare" * self.bare
        return self.tag or f"localhost/falaj-{self.kind}:{VERSION}{added}"


def slug(text: str) -> str:
    """Return `text` as a part of a tag."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:60] or "environment"


def check_request(request: ImageRequest) -> None:
    """Raise an error for a request that cannot be met, before anything is made."""
    if request.kind not in RECIPES:
        raise InvalidInput.at("KIND", given=request.kind, allowed=", ".join(RECIPES))
    _require(TaggedImage, request.reference, "--tag")
    if request.base == DEBIAN:
        debian_suite()
        require_mmdebstrap()
    else:
        _require(BaseImage, request.base, "--base")
    if request.mirror is not None and not re.fullmatch(r"https?://[^\s'\"]+|file:/[^\s'\"]+", request.mirror):
        raise InvalidInput.at(
            "--mirror", given=request.mirror, allowed="an address like http://deb.debian.org/debian"
        )
    if request.kind != "worker" and (request.environment is not None or request.bare):
        option = "--bare" if request.environment is None else "--environment"
        raise InvalidInput.at(option, given=request.kind, allowed="for the image worker, in which jobs run")
    if request.environment is not None:
        read_lock(request.environment)
    if request.output is not None and request.push:
        raise InvalidInput.at("--push", allowed="without --output: an image goes to a registry or to a file")
    if request.output is not None:
        require_new_file(request.output)


def require_new_file(path: Path) -> None:
    """Raise an error unless `path` can be made: nothing that exists is replaced."""
    if path.exists() or path.is_symlink():
        raise AlreadyExists(f"{path} exists; delete it, or name another file with --output")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidInput.at(
            "--output", given=str(path), allowed="a file in a folder that can be written to"
        )


def build_image(request: ImageRequest, report: Report, *, make_base: MakeBase = make_rootfs) -> ImageBuild:
    """Build the image, and return where it is and what it has. `make_base` writes the base of Debian packages."""
    began = time.monotonic()
    check_request(request)
    builder = choose_builder(request.builder, is_file=request.output is not None)
    _require_output(request, builder)
    where = tempfile.gettempdir() if request.output is None else str(request.output.absolute().parent)
    with _full_disks(where), build_folder(Path(where)) as folder:
        context, system_packages = prepare(folder / "context", request, report, make_base=make_base)
        draft = folder / "image.tar"
        made = _build(request, builder, context, draft, report)
        if request.output is not None:
            sync_file(draft)
            os.link(draft, request.output)  # unlike a rename, it replaces nothing
    return ImageBuild(
        reference=request.reference,
        digest=made.digest,
        kind=request.kind,
        version=VERSION,
        python=python_version(),
        base=request.base if request.base != DEBIAN else f"{DEBIAN} {debian_suite()}",
        environment=None if request.environment is None else request.environment.name,
        packages=tuple(each.pin for each in context.pins),
        system_packages=system_packages,
        size_bytes=made.size_bytes,
        builder="none" if builder is None else builder.name,
        archive=None if request.output is None else str(request.output.absolute()),
        pushed=request.push,
        built_at=utc_now(),
        took_s=round(time.monotonic() - began, 1),
    )


@contextlib.contextmanager
def build_folder(where: Path) -> Iterator[Path]:
    """Yield a new folder in `where` to build in, and delete it afterwards, like those of builds that were killed."""
    for left in where.glob(f"{DRAFT}*"):
        with contextlib.suppress(OSError), _locked(left, wait=False):
            shutil.rmtree(left, ignore_errors=True)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=DRAFT, dir=where))
        with _locked(folder, wait=True):
            if not folder.exists():  # another build took it for one that was left behind
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold a folder while it is in use; the lock ends with the process, however that ends."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def prepare(
    folder: Path, request: ImageRequest, report: Report, *, make_base: MakeBase = make_rootfs
) -> tuple[BuildContext, tuple[str, ...]]:
    """Write the whole build context to `folder`; return it, and the packages of the base as far as it is made here."""
    report(f"getting the packages of the {request.kind} image")
    context = write_context(
        folder,
        request.kind,
        base=request.base,
        environment=request.environment,
        bare=request.bare,
        report=report,
    )
    if request.base != DEBIAN:
        return context, ()
    report(f"making the base from packages of Debian {debian_suite()}")
    return context, make_base(context.rootfs, mirror=request.mirror, report=report)


def preview(request: ImageRequest) -> str:
    """Return the Dockerfile of a request without resolving its packages, so that it has no label of the lock."""
    return render_dockerfile(ImageSettings(request.kind, request.base, ""))


def record_build(home: Path, made: ImageBuild) -> Path:
    """Store the result of a build in a home, under its digest."""
    folder = home / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{made.digest.removeprefix('sha256:')}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(made.model_dump_json(indent=2))
    sync_file(draft)
    os.replace(draft, path)
    return path


def recorded_builds(home: Path) -> list[ImageBuild]:
    """Return the images that were built for a home, the newest first; files that cannot be read are left out."""
    found = list[ImageBuild]()
    for path in (home / FOLDER).glob("*.json"):
        with contextlib.suppress(OSError, ValidationError):
            found.append(ImageBuild.model_validate_json(path.read_bytes()))
    return sorted(found, key=lambda each: each.built_at, reverse=True)


def _build(
    request: ImageRequest,
    builder: ContainerBuilder | None,
    context: BuildContext,
    draft: Path,
    report: Report,
) -> ArchivedImage:
    reference = request.reference
    if builder is None:
        report("writing the image")
        layer = draft.with_name("packages.tar")
        write_packages(layer, context, report)
        return write_image(draft, [context.rootfs, layer], context.settings.config(), reference)
    report(f"building with {builder.name}")
    builder.build(context, reference, report)
    if request.output is not None:
        report(f"saving {reference}")
        return builder.save(reference, draft, report)
    digest, size_bytes = builder.inspect(reference)
    if request.push:
        report(f"pushing {reference}")
        digest = builder.push(reference, report)
    return ArchivedImage(digest, size_bytes)


def _require_output(request: ImageRequest, builder: ContainerBuilder | None) -> None:
    if builder is not None:
        return
    if request.output is None:
        raise InvalidInput.at(
            "--output", allowed="a file: without a container builder, that is where the image goes"
        )
    if request.base != DEBIAN:
        raise InvalidInput.at(
            "--base",
            given=request.base,
            allowed=f"{DEBIAN}: without a container builder no image can be pulled",
        )


def _require(kind: Any, given: str, where: str) -> None:
    try:
        TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        words = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InvalidInput.at(where, given=given, allowed=words) from None


@contextlib.contextmanager
def _full_disks(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = format_size(shutil.disk_usage(where).free)
        raise Unavailable(
            f"the disk of {where} is full ({free} free): a worker with torch needs several GiB for its build; "
            "nothing was kept. Free some space, or choose another disk by --output or TMPDIR"
        ) from error
