"""The build context of an image: every wheel with its hash, pip to install them, and Falaj itself as a wheel.

Packages are resolved and downloaded here, by pip as this machine configures it. So a build needs no network.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from falaj.assembly.images.kinds import GROUP, PASSWD, RECIPES, ImageSettings, render_dockerfile
from falaj.assembly.images.lock import Pin, normalized, parse_lock, read_lock, unlocked
from falaj.assembly.images.programs import Report, run_program
from falaj.errors import Fault, InvalidInput, Unavailable
from falaj.records.training.images import ImageKind
from falaj.version import VERSION

PACKAGE = Path(__file__).parents[2]
"""The package falaj."""
LEFT_OUT = {"__pycache__", ".mypy_cache"}
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of all files in a wheel, so that the same files make the same wheel."""
WHEEL = "Wheel-Version: 1.0\nGenerator: falaj\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True)
class BuildContext:
    """A folder that a container builder makes an image from. `pins` are its packages."""

    folder: Path
    settings: ImageSettings
    pins: tuple[Pin, ...]

    @property
    def wheels(self) -> Path:
        return self.folder / "wheels"

    @property
    def requirements(self) -> Path:
        return self.folder / "requirements.txt"

    @property
    def rootfs(self) -> Path:
        """The base, where it is made from Debian packages."""
        return self.folder / "base.tar"


def write_context(
    folder: Path, kind: ImageKind, *, base: str, environment: Path | None, bare: bool, report: Report
) -> BuildContext:
    """Fill `folder` with all that the image needs, except its base."""
    added = [] if environment is None else read_lock(environment)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    pack_falaj(wheels)
    wanted = [*RECIPES[kind].requirements(bare=bare), *(each.text for each in added)]
    known = locked_versions(added)
    if wanted:
        download(wanted, known, wheels, report)
    pins = tuple(sorted(wheel_pins(wheels), key=lambda each: normalized(each.name)))
    require_locked(pins, known, added, name="" if environment is None else environment.name)
    lock = "".join(f"{each.pin} --hash=sha256:{next(iter(each.hashes))}\n" for each in pins)
    settings = ImageSettings(kind, base, lock)
    context = BuildContext(folder, settings, pins)
    context.requirements.write_text(lock)
    copy_pip(folder / "pip")
    (folder / "passwd").write_text(PASSWD)
    (folder / "group").write_text(GROUP)
    (folder / "Dockerfile").write_text(render_dockerfile(settings))
    return context


def constraints() -> list[Pin]:
    """Return the versions that Falaj is tested with: of an installed package, or of the repository."""
    for path in (PACKAGE / "constraints.txt", PACKAGE.parents[1] / "constraints.txt"):
        if path.is_file():
            return parse_lock(path.read_text(), name=path.name)
    raise Unavailable("this installation of Falaj has no constraints.txt; install it again from its wheel")


def locked_versions(added: Sequence[Pin]) -> dict[str, str]:
    """Return the version of each package that an image may have; a lock that was given counts more than Falaj's own."""
    known = {normalized(each.name): each.version for each in constraints()}
    return known | {normalized(each.name): each.version.partition("+")[0] for each in added}


def download(wanted: Sequence[str], known: dict[str, str], wheels: Path, report: Report) -> None:
    """Have pip resolve `wanted` within the `known` versions, and download the wheels; sources are not built."""
    limits, asked = wheels.parent / "limits.txt", wheels.parent / "wanted.txt"
    limits.write_text("".join(f"{name}=={version}\n" for name, version in known.items() if name != "falaj"))
    asked.write_text("".join(f"{each}\n" for each in wanted))
    options = ("--only-binary", ":all:", "--dest", wheels, "--find-links", wheels, "--progress-bar", "off")
    files = ("--constraint", limits, "--requirement", asked)
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--retries", "2", *options, *files]
    require_pip()
    done = run_program([str(each) for each in command], report)
    for each in (limits, asked):
        each.unlink()
    if done.code:
        began = next((n for n, line in enumerate(done.lines) if line.startswith("ERROR:")), -3)
        said = [line for line in done.lines[began:] if not line.startswith("WARNING:")]
        raise Unavailable(
            f"pip cannot get the packages of the image: {' '.join(said)[:1500]}",
            faults=[
                Fault(
                    where="pip",
                    allowed=f"an index with wheels for Python {sys.version_info.major}.{sys.version_info.minor}",
                    fix="see pip config list; PIP_INDEX_URL or PIP_FIND_LINKS name an index or a folder of wheels",
                )
            ],
        )


def require_locked(pins: Sequence[Pin], known: dict[str, str], added: Sequence[Pin], *, name: str) -> None:
    """Raise InvalidInput if the image would have a package that no lock has, or a file whose hash it does not have."""
    faults = [
        Fault(
            where=each, allowed="a package that is locked", fix=f"add {each} to {name or 'constraints.txt'}"
        )
        for each in unlocked(pins, known=known | {"falaj": VERSION})
    ]
    hashes: dict[str, frozenset[str]] = {}
    for each in added:
        hashes[normalized(each.name)] = hashes.get(normalized(each.name), frozenset()) | each.hashes
    for each in pins:
        allowed = hashes.get(normalized(each.name))
        if allowed and not each.hashes & allowed:
            faults.append(
                Fault(
                    where=f"{name}: {each.pin}",
                    given=f"sha256:{next(iter(each.hashes))}",
                    allowed=f"one of the {len(allowed)} hashes of the file",
                    fix="the index has another file than the one that was locked: find out why",
                )
            )
    if faults:
        raise InvalidInput("the packages of the image are not all locked", faults=faults)


def wheel_pins(wheels: Path) -> Iterator[Pin]:
    """Yield the package of each wheel in a folder, with its hash."""
    for path in sorted(wheels.glob("*.whl")):
        name, version = path.name.split("-")[:2]
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        plain = name.replace("_", "-")
        yield Pin(plain, version, f"{plain}=={version}", frozenset([found]))


def pack_falaj(wheels: Path) -> Path:
    """Write the Falaj that runs now as a wheel: the same files, also where it is an editable installation."""
    info = f"falaj-{VERSION}.dist-info"
    metadata = distribution("falaj")
    contents: list[tuple[str, bytes]] = [
        (f"falaj/{path.relative_to(PACKAGE).as_posix()}", path.read_bytes())
        for path in sorted(PACKAGE.rglob("*"))
        if path.is_file() and path.suffix != ".pyc" and not LEFT_OUT & set(path.parts)
    ]
    limits = PACKAGE.parents[1] / "constraints.txt"
    if limits.is_file() and not (PACKAGE / "constraints.txt").exists():
        contents.append(("falaj/constraints.txt", limits.read_bytes()))
    contents += [
        (f"{info}/METADATA", (metadata.read_text("METADATA") or "").encode()),
        (f"{info}/entry_points.txt", (metadata.read_text("entry_points.txt") or "").encode()),
        (f"{info}/WHEEL", WHEEL.encode()),
    ]
    record = "".join(f"{name},{_record_hash(data)},{len(data)}\n" for name, data in contents)
    contents.append((f"{info}/RECORD", f"{record}{info}/RECORD,,\n".encode()))
    target = wheels / f"falaj-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in contents:
            wheel.writestr(zipfile.ZipInfo(name, EPOCH), data, zipfile.ZIP_DEFLATED)
    return target


def _record_hash(data: bytes) -> str:
    found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"sha256={found}"


def require_pip() -> None:
    if find_spec("pip") is None:
        raise Unavailable(f"{sys.executable} has no pip, which gets the packages: run python -m ensurepip")


def copy_pip(target: Path) -> None:
    """Copy pip as this Python has it: it installs the packages inside the builder."""
    require_pip()
    spec = find_spec("pip")
    assert spec is not None and spec.origin is not None  # noqa: S101, PT018
    shutil.copytree(Path(spec.origin).parent, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
