"""A base made from Debian packages by mmdebstrap, without a registry: Python, its libraries, certificates, time zones.

It has no shell, no package manager and no compiler. The same packages make the same bytes.
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
import tarfile
from pathlib import Path
from py_compile import PycInvalidationMode
from urllib.parse import unquote

from falaj.assembly.images.archives import write_layer
from falaj.assembly.images.kinds import python_version
from falaj.assembly.images.programs import Report, run_program
from falaj.errors import InvalidInput, Unavailable

SUITES = {"3.11": "bookworm", "3.13": "trixie"}
"""Which release of Debian has which Python."""
PACKAGES = ("base-files", "ca-certificates", "libgomp1", "libstdc++6", "netbase", "python3", "tzdata")
KEPT = re.compile(
    r"usr/bin/python3(\.\d+)?|usr/lib/python3\.\d+/.+|usr/lib/[^/]+-linux-gnu/[^/]+\.so[^/]*"
    r"|lib/[^/]+-linux-gnu/[^/]+|lib64/.+|usr/share/zoneinfo/(?!right|posix).+|usr/share/ca-certificates/.+"
    r"|usr/lib/ssl/.+|etc/ssl/openssl.cnf|etc/(os-release|debian_version|services|protocols|mime.types)"
    r"|usr/lib/os-release|usr/share/doc/[^/]+/copyright|usr/share/common-licenses/.+"
)
DROPPED = re.compile(
    r"usr/lib/python3\.\d+/(test|idlelib|lib2to3|tkinter|turtledemo|ensurepip|pydoc_data)/.+"
)
FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp", "var/lib/falaj", "var/tmp")
SHARED = ("tmp", "var/tmp")
DEB = re.compile(r"var/cache/apt/archives/([^_/]+)_([^_/]+)_([^_/]+)\.deb")
INSTALL_HINT = "apt install mmdebstrap; or name an image that has Python: --base IMAGE"


def debian_suite() -> str:
    """Return the release of Debian that has the Python that runs now."""
    found = SUITES.get(python_version())
    if found is None:
        known = ", ".join(f"{suite} (Python {python})" for python, suite in SUITES.items())
        raise InvalidInput.at(
            "--base",
            given=f"debian, with Python {python_version()}",
            allowed=f"one of {known}",
            fix=f"--base IMAGE, with Python {python_version()}",
        )
    return found


def require_mmdebstrap() -> None:
    if shutil.which("mmdebstrap") is None:
        raise Unavailable(
            f"mmdebstrap, which makes the base from Debian packages, is not installed: {INSTALL_HINT}"
        )


def make_rootfs(target: Path, *, mirror: str | None, report: Report) -> tuple[str, ...]:
    """Write the base to the tar file `target`, and return the Debian packages in it as name=version."""
    require_mmdebstrap()
    suite, raw = debian_suite(), target.with_name("debian.tar")
    options = ("--variant=extract", "--format=tar", f"--include={','.join(PACKAGES)}")
    command = ["mmdebstrap", *options, "--skip=cleanup/apt/cache", suite, str(raw)]
    done = run_program([*command, *([mirror] if mirror else [])], report)
    if done.code:
        said = [line for line in done.lines if line.startswith(("E:", "Err:"))] or done.lines[-3:]
        raise Unavailable(
            f"mmdebstrap cannot make the base from Debian {suite}: {' '.join(said)[:1000]}; name a mirror that can be "
            "reached (--mirror URL), or an image that has Python (--base IMAGE)"
        )
    folder = target.with_name("rootfs")
    packages = unpack(raw, folder)
    raw.unlink()
    report("compiling the standard library")
    compile_tree(folder / "usr/lib" / f"python{python_version()}", root=folder)
    write_layer(target, folder, shared=SHARED)
    shutil.rmtree(folder)
    return packages


def unpack(raw: Path, folder: Path) -> tuple[str, ...]:
    """Unpack what an image needs of the packages; return their names and versions."""
    packages = list[tuple[str, str, str]]()
    with tarfile.open(raw) as archive:
        archive.extraction_filter = lambda member, _: (
            member
        )  # `extract` below filters, also before Python 3.11.4
        for member in archive:
            name = member.name.removeprefix("./")
            if deb := DEB.fullmatch(name):
                packages.append((deb[1], unquote(deb[2]), deb[3]))
            elif KEPT.fullmatch(name) and not DROPPED.fullmatch(name) and not member.isdir():
                member.name = name
                extract(archive, member, folder)
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_configuration(folder)
    for name, version, architecture in packages:
        entry = f"Package: {name}\nStatus: install ok installed\nVersion: {version}\nArchitecture: {architecture}\n"
        status = folder / "var/lib/dpkg/status.d" / name
        status.parent.mkdir(parents=True, exist_ok=True)
        status.write_text(entry)
    return tuple(sorted(f"{name}={version}" for name, version, _ in packages))


def extract(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write `member` below `folder`, without setuid and write access of others. A link may point anywhere."""
    target = folder / member.name
    place = target.parent.resolve() / target.name if member.issym() else target.resolve()
    if not place.is_relative_to(folder.resolve()):
        raise InvalidInput(
            f"the packages of the base have the file {member.name!r}, which would be outside the base"
        )
    member.mode &= 0o755
    archive.extract(member, folder)


def write_configuration(folder: Path) -> None:
    """Write what the packages' own scripts would: the certificates in one file, and how names are resolved."""
    found = sorted((folder / "usr/share/ca-certificates").rglob("*.crt"))
    bundle = folder / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_bytes(b"".join(each.read_bytes() for each in found))
    (folder / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")


def compile_tree(folder: Path, *, root: Path) -> None:
    """Compile the modules below `folder`, which will be at the same place below / instead of `root`.

    The result counts whatever the times of the files are: an image is read-only, and compiled once.
    """
    compileall.compile_dir(
        folder,
        maxlevels=50,
        quiet=2,
        stripdir=str(root),
        prependdir="/",
        invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
        workers=min(2, os.cpu_count() or 1),
    )
