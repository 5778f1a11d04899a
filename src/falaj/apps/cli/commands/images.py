"""`falaj images`: build container images of the platform, of workers and of the model server, on this machine."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from falaj.apps.cli.generation.typer_commands import group
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.step_progress import step_progress
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import format_value, plural, printable
from falaj.apps.cli.session import Session
from falaj.assembly.home import find_home
from falaj.assembly.images.build import (
    ImageRequest,
    build_image,
    check_request,
    prepare,
    preview,
    record_build,
    recorded_builds,
    slug,
)
from falaj.assembly.images.builders import CHOICES
from falaj.assembly.images.kinds import DEBIAN, RECIPES, context_parts
from falaj.errors import AlreadyExists, InvalidInput
from falaj.records.places import default_home
from falaj.records.sizes import format_size
from falaj.records.training.images import ImageBuild

SUMMARY = "Build container images of the platform, of workers and of the model server."

KIND = Annotated[str, typer.Argument(metavar="KIND", help=f"{', '.join(RECIPES)}. (default: worker)")]
BASE = Annotated[
    str,
    typer.Option(
        metavar="IMAGE",
        help=f"What it is built on: {DEBIAN}, made from Debian packages without a registry, or an image with Python.",
    ),
]
MIRROR = Annotated[
    str | None, typer.Option(metavar="URL", help="The Debian mirror. (default: that of mmdebstrap)")
]
ENVIRONMENT = Annotated[
    str | None, typer.Option(metavar="FILE", help="A locked requirements file that a worker has besides.")
]
BARE = Annotated[
    bool, typer.Option("--bare", help="A worker of Python and Falaj alone, without torch and numpy.")
]


def build(
    session: Session,
    kind: KIND = "worker",
    *,
    environment: ENVIRONMENT = None,
    bare: BARE = False,
    base: BASE = DEBIAN,
    mirror: MIRROR = None,
    builder: Annotated[
        str, typer.Option(metavar="NAME", help=f"{', '.join(CHOICES)}; none writes --output by itself.")
    ] = "auto",
    tag: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:TAG",
            help="The name of the image. (default: localhost/falaj-KIND:VERSION, on no registry)",
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FILE.tar", help="Write it to a file that container runtimes load.")
    ] = None,
    push: Annotated[bool, typer.Option("--push", help="Push it to the registry of its name.")] = False,
) -> None:
    """Build an image, and show its digest, by which falaj.toml names it."""
    request = _request(
        session, kind, base=base, mirror=mirror, environment=environment, bare=bare
    ).with_result(tag=tag, builder=builder, output=None if output is None else Path(output), push=push)
    with step_progress(f"building {request.reference}") as report:
        made = build_image(request, report)
    home = find_home(session.home or default_home())
    if home is not None:
        record_build(home.path, made)
    session.show(made, _show_build)


def render(
    session: Session,
    kind: KIND = "worker",
    *,
    environment: ENVIRONMENT = None,
    bare: BARE = False,
    base: BASE = DEBIAN,
    mirror: MIRROR = None,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write the whole build context to this new folder.")
    ] = None,
) -> None:
    """Print the Dockerfile of an image, or write it with its whole build context to a folder."""
    request = _request(session, kind, base=base, mirror=mirror, environment=environment, bare=bare)
    if output is None:
        text = preview(request)
        made = {"dockerfile": text, "context": ["Dockerfile", *context_parts(request.base)]}
        session.show(made, lambda _made: print(text, end=""))
        return
    folder = Path(output)
    if folder.exists():
        raise AlreadyExists(f"{folder} exists; name a new folder with --output")
    check_request(request)
    with step_progress(f"writing {folder}") as report:
        prepare(folder, request, report)
    listed = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    session.show({"folder": str(folder), "context": listed}, lambda _made: _show_context(folder, listed))


def list_images(session: Session) -> None:
    """List the images that were built for the home, the newest first."""
    home = find_home(session.home or default_home())
    found = [] if home is None else recorded_builds(home.path)
    session.show(found, _show_builds)


def _request(
    session: Session,
    kind: str,
    *,
    base: str,
    mirror: str | None,
    environment: str | None,
    bare: bool,
) -> ImageRequest:
    if session.url:
        raise InvalidInput("images are built on this machine; --url does not name one")
    if kind not in RECIPES:
        raise InvalidInput.at("KIND", given=kind, allowed=", ".join(RECIPES))
    file = None if environment is None else Path(environment)
    return ImageRequest(kind, base, mirror, file, bare)


def _show_build(made: ImageBuild) -> None:
    size, packages = format_size(made.size_bytes), plural(len(made.packages), "Python package")
    print(f"{made.reference} is built: {size}, {packages}, by {made.builder} in {made.took_s:.0f} s")
    print(f"  digest {made.digest}")
    if made.archive is not None:
        file = shlex.quote(made.archive)
        print(
            f"  load   ctr --namespace k8s.io images import {file}   (on each node; or podman load --input …)"
        )
    if made.kind == "worker":
        setting = "image" if made.environment is None else "environments." + _name_of(made)
        print(f'  use    in falaj.toml, [kubernetes]: {setting} = "{made.pinned}"')
    if made.environment is not None:
        print(f"  then   falaj train … --environment {_name_of(made)}")


def _name_of(made: ImageBuild) -> str:
    return slug(Path(made.environment or "").stem)


def _show_context(folder: Path, listed: list[str]) -> None:
    print(f"{folder} has the build context: {', '.join(listed)}")
    print(f"  next   podman build --tag NAME:TAG {shlex.quote(str(folder))}")


def _show_builds(found: list[ImageBuild]) -> None:
    rows = [
        [
            printable(each.reference),
            each.digest[:19],
            printable(each.environment or "-"),
            format_size(each.size_bytes),
            str(len(each.packages)),
            format_value(each.built_at),
        ]
        for each in found
    ]
    if rows:
        show_rows(["image", "digest", "environment", "size", "packages", "built"], rows)
    else:
        show([], as_json=False)


COMMANDS = {
    "images": partial(group, "images", SUMMARY, {"build": build, "render": render, "list": list_images})
}
