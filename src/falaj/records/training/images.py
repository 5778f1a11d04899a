"""Container images: how they are named, which of them may run, and what a build has made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Literal, NamedTuple

from falaj.errors import InvalidInput
from falaj.records.names import TextRule
from falaj.records.record import Record

ImageKind = Literal["platform", "worker", "server"]

_HOST = r"(?:localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:[0-9]))(?::[0-9]{1,5})?"
_PATH = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = rf"{_HOST}(?:/{_PATH})+"
_ANY_NAME = rf"(?:{_HOST}/)?{_PATH}(?:/{_PATH})*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
DIGEST = r"sha256:[0-9a-f]{64}"

REFERENCE = re.compile(rf"(?P<repository>{_ANY_NAME})(?::(?P<tag>{_TAG}))?(?:@(?P<digest>{DIGEST}))?")
LONGEST_REFERENCE = 512

PINNED_RULE = "an image by its digest, like registry.example.com/falaj-worker@sha256:… with 64 hex digits"
TAGGED_RULE = (
    "HOST/NAME:TAG, like registry.example.com/falaj-worker:1, or localhost/falaj-worker:1 for one that no "
    "registry holds"
)

ALLOWED_RULE = (
    "REPOSITORY@sha256:… for one image, or REPOSITORY for all of its images by digest; tags can be moved"
)

PinnedImage = Annotated[str, TextRule(rf"{_NAME}(?::{_TAG})?@{DIGEST}", PINNED_RULE, limit=400)]
"""An image whose content is fixed."""
TaggedImage = Annotated[str, TextRule(rf"{_NAME}:{_TAG}", TAGGED_RULE, limit=400)]
"""An image by name and tag. The host is part of it, so that no program adds one of its own choice."""
BaseImage = Annotated[
    str,
    TextRule(
        rf"{_ANY_NAME}(?::(?!latest$){_TAG}(?:@{DIGEST})?|@{DIGEST})",
        "debian, or an image with a digest or a tag other than latest, like python:3.11-slim",
        limit=400,
    ),
]
"""An image to build on."""


class ImageBuild(Record):
    """An image that was built: by which name and digest it is found, and what is in it.

    `packages` are all Python packages as name==version, `system_packages` those of the base, as far as Falaj made it.
    `archive` is the file that holds the image; it was `pushed` if a registry has it.
    """

    reference: TaggedImage
    digest: str
    kind: ImageKind
    version: str
    python: str
    base: str
    environment: str | None = None
    packages: tuple[str, ...]
    system_packages: tuple[str, ...] = ()
    size_bytes: int
    builder: str
    archive: str | None = None
    pushed: bool = False
    built_at: datetime
    took_s: float

    @property
    def pinned(self) -> str:
        """The image by its digest, as falaj.toml and pods name it."""
        return f"{self.reference.rpartition(':')[0]}@{self.digest}"


class ImageReference(NamedTuple):
    """The parts of `registry.example.com/team/worker:1.2@sha256:…`."""

    repository: str
    tag: str | None
    digest: str | None


def read_image(given: str) -> ImageReference:
    """Read a reference; raise ValueError if it is none."""
    found = REFERENCE.fullmatch(given) if len(given) <= LONGEST_REFERENCE else None
    if found is None:
        raise ValueError("an image, like registry.example.com/falaj-worker@sha256:…")
    return ImageReference(found["repository"], found["tag"], found["digest"])


def read_image_rule(given: str) -> ImageReference:
    """Read an entry of the allow-list; raise ValueError if it is none."""
    try:
        found = read_image(given)
    except ValueError:
        found = None
    if found is None or found.tag is not None:
        raise ValueError(ALLOWED_RULE)
    return found


def is_allowed(image: str, rules: Sequence[str]) -> bool:
    """Return whether an image has a digest and is in the list. Repositories are compared as a whole."""
    try:
        found = read_image(image)
    except ValueError:
        return False
    allowed = [read_image_rule(rule) for rule in rules]
    return found.digest is not None and any(
        rule.repository == found.repository and rule.digest in (None, found.digest) for rule in allowed
    )


def require_image(image: str, *, rules: Sequence[str], own: str) -> None:
    """Raise InvalidInput for an image that may not run. Without `rules` it is `own` alone, the administrator's."""
    if is_allowed(image, rules) if rules else image == own:
        return
    listed = ", ".join(rules[:5]) + (" …" if len(rules) > 5 else "") if rules else own
    raise InvalidInput.at(
        "image",
        given=image,
        allowed=f"{listed} (kubernetes.images)" if rules else f"{listed} (kubernetes.image)",
        fix="name the image by its digest, and add it to kubernetes.images",
    )
