"""The container builders: podman, buildah and docker, each by its own program, and none of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from falaj.assembly.images.archives import ArchivedImage, rename_image
from falaj.assembly.images.context import BuildContext
from falaj.assembly.images.kinds import DEBIAN
from falaj.assembly.images.programs import Finished, Report, run_program
from falaj.errors import InvalidInput, Unavailable

BuilderName = Literal["podman", "buildah", "docker"]
BUILDERS: tuple[BuilderName, ...] = ("podman", "buildah", "docker")
NO_BUILDER = "none"
CHOICES = ("auto", *BUILDERS, NO_BUILDER)
INSTALL = {
    "podman": "apt install podman, or dnf install podman",
    "buildah": "apt install buildah, or dnf install buildah",
    "docker": "install Docker, and start its daemon",
}
PULL_FAULTS = re.compile(
    r"initializing source|pinging container registry|failed to resolve|error pulling|unable to copy from source"
    r"|no such host|dial tcp|manifest unknown|pull access denied|short-name|failed to fetch",
    re.IGNORECASE,
)
ANSWER_S = 20.0


@dataclass(frozen=True)
class ContainerBuilder:
    """One of the builders that this machine has."""

    name: BuilderName

    def build(self, context: BuildContext, reference: str, report: Report) -> None:
        """Build the image of a context under the name `reference`."""
        folder = context.folder
        file = ("--file", str(folder / "Dockerfile"), "--tag", reference)
        # The steps install files with known hashes; a chroot is enough for them, and works without privileges.
        own = () if self.name == "docker" else ("--isolation", "chroot", "--layers=false", "--format", "oci")
        done = self._run(["build", *own, *file, str(folder)], report)
        if done.code:
            raise self._build_fault(done, context.settings.base)

    def save(self, reference: str, target: Path, report: Report) -> ArchivedImage:
        """Write a built image to the archive `target`."""
        with tempfile.TemporaryDirectory(prefix=".image-", dir=target.parent) as folder:
            plain = Path(folder) / "image.tar"
            words = {
                "podman": ["save", "--format", "oci-archive", "--output", str(plain), reference],
                "buildah": ["push", reference, f"oci-archive:{plain}:{reference}"],
                "docker": ["save", "--output", str(plain), reference],
            }
            self._require(self._run(words[self.name], report), f"cannot save {reference}")
            return rename_image(plain, target, reference)

    def push(self, reference: str, report: Report) -> str:
        """Push a built image to the registry of its name, and return the digest that it has there."""
        with tempfile.TemporaryDirectory(prefix="falaj-image-") as folder:
            file = Path(folder) / "digest"
            noted = [] if self.name == "docker" else ["--digestfile", str(file)]
            done = self._run(["push", *noted, reference], report)
            if done.code:
                raise Unavailable(
                    f"{self.name} cannot push {reference}: {tail(done)}",
                    details={"fix": f"{self.name} login {reference.partition('/')[0]}"},
                )
            if self.name != "docker":
                return file.read_text().strip()
        found = self._answer(["image", "inspect", "--format", "{{json .RepoDigests}}", reference])
        name = reference.rpartition(":")[0]
        return next(str(each).partition("@")[2] for each in json.loads(found) if each.startswith(f"{name}@"))

    def inspect(self, reference: str) -> tuple[str, int]:
        """Return the digest of a built image as this machine holds it, and its size in bytes."""
        if self.name == "buildah":
            found = json.loads(self._answer(["inspect", "--type", "image", reference]))
            size = json.loads(self._answer(["images", "--json", reference]))[0]["size"]
            return str(found["FromImageDigest"]), size_bytes(str(size))
        wanted = "{{.Digest}} {{.Size}}" if self.name == "podman" else "{{.Id}} {{.Size}}"
        digest, size = self._answer(["image", "inspect", "--format", wanted, reference]).split()
        return digest, int(size)

    def _run(self, words: list[str], report: Report) -> Finished:
        environment = {"DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"} if self.name == "docker" else {}
        return run_program([self.name, *words], report, environment=environment)

    def _answer(self, words: list[str]) -> str:
        """Return the whole output of a short command."""
        done = subprocess.run([self.name, *words], capture_output=True, text=True, check=False)
        said = Finished(done.returncode, done.stderr.splitlines())
        self._require(said, f"does not answer {' '.join(words[:2])}")
        return done.stdout

    def _require(self, done: Finished, what: str) -> None:
        if done.code:
            raise Unavailable(f"{self.name} {what}: {tail(done)}")

    def _build_fault(self, done: Finished, base: str) -> Unavailable:
        said = [line for line in done.lines if PULL_FAULTS.search(line)]
        if said and base != DEBIAN:
            return Unavailable(
                f"{self.name} cannot get the base {base}: {said[-1][:500]}; name one that can be reached or that "
                f"{self.name} has already (--base IMAGE), or make it from Debian packages (--base {DEBIAN})"
            )
        return Unavailable(f"{self.name} cannot build the image: {tail(done)}")


def choose_builder(wanted: str, *, is_file: bool) -> ContainerBuilder | None:
    """Return the builder to use; none where Falaj writes the archive itself, which it can if the result `is_file`."""
    if wanted not in CHOICES:
        raise InvalidInput.at("--builder", given=wanted, allowed=", ".join(CHOICES))
    if wanted == NO_BUILDER:
        return None
    for name in BUILDERS:
        if wanted in ("auto", name) and is_there(name):
            return ContainerBuilder(name)
    if wanted != "auto":
        raise Unavailable(
            f"the builder {wanted} is not there, or does not answer: {INSTALL[wanted]}; or use another one: "
            "--builder auto"
        )
    if is_file:
        return None
    raise Unavailable(
        f"no container builder is there: {INSTALL['podman']}; without one, write the image to a file: --output FILE.tar"
    )


def is_there(name: BuilderName) -> bool:
    """Return whether this machine has a builder that answers; docker is a client, and needs its daemon."""
    program = shutil.which(name)
    if program is None or name != "docker":
        return program is not None
    try:
        asked = [program, "version", "--format", "{{.Server.Version}}"]
        return subprocess.run(asked, capture_output=True, timeout=ANSWER_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def size_bytes(text: str) -> int:
    """Return the bytes of a size as buildah prints it: 45.1 MB."""
    number, _, unit = text.partition(" ")
    return int(float(number) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}.get(unit, 1))


def tail(done: Finished) -> str:
    return " ".join(done.lines[-4:])[:1000] or f"exit code {done.code}"
