"""The image for the pods of the tests, built as users build theirs, without a registry and without a builder.

python tests/kubernetes/worker_image.py worker.tar

Its base of Debian packages is kept in `.images`, so that only the first build needs a mirror.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from falaj.assembly.images.build import ImageRequest, build_image
from falaj.assembly.images.debian import SUITES, make_rootfs
from falaj.assembly.images.kinds import python_version
from falaj.assembly.images.programs import Report

IMAGE = "localhost/falaj-worker:test"
KEPT = Path(__file__).parents[2] / ".images" / f"debian-{SUITES.get(python_version(), 'none')}.tar"


def lacks() -> str | None:
    """Return what this machine lacks to build the image; none if it has all."""
    if python_version() not in SUITES:
        return f"a Debian release with Python {python_version()}"
    return "mmdebstrap" if shutil.which("mmdebstrap") is None else None


def build_worker_image(target: Path) -> Path:
    """Write the image as an archive that container runtimes load, and return its path."""
    request = ImageRequest("worker", bare=True, tag=IMAGE, builder="none", output=target)
    build_image(request, print, make_base=kept_base)
    return target


def kept_base(target: Path, *, mirror: str | None, report: Report) -> tuple[str, ...]:
    """Copy the base that an earlier build has left; make it where there is none."""
    ensure_base(report, mirror=mirror)
    shutil.copy(KEPT, target)
    return ()


def ensure_base(report: Report, *, mirror: str | None = None) -> None:
    """Make the base of Debian packages unless an earlier build has left it; Unavailable if no mirror answers."""
    if not KEPT.exists():
        KEPT.parent.mkdir(exist_ok=True)
        draft = KEPT.with_suffix(f".{os.getpid()}")
        make_rootfs(draft, mirror=mirror, report=report)
        os.replace(draft, KEPT)


if __name__ == "__main__":
    print(build_worker_image(Path(sys.argv[1])))
