"""The Python environments of jobs: the platform's own, and virtualenvs that falaj.toml lists."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from falaj.control.jobs.staging import make_readable
from falaj.errors import InvalidInput
from falaj.ports.cluster.python_packages import list_packages
from falaj.ports.launcher import PodImage

PACKAGE = Path(__file__).parents[2]
"""The package falaj: jobs import the runtime from it."""

RUNTIME = "runtime"


class JobPython:
    """A virtualenv, or the platform's own Python if `folder` is None."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @property
    def executable(self) -> str:
        return sys.executable if self._folder is None else str(self._folder / "bin" / "python")

    @property
    def programs(self) -> str:
        """The folder with its programs, for example mpiexec."""
        return str(Path(self.executable).parent)

    @property
    def readable(self) -> tuple[Path, ...]:
        """The paths that a job must be able to read: the package, the virtualenv, and its base Python."""
        if self._folder is None:
            return (PACKAGE,)
        made_of = (self._folder / "bin" / "python").resolve().parents[1]
        return PACKAGE, self._folder, made_of

    def variables(self, links: Path, given: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables by which `import falaj` finds the runtime: a link in the folder `links`.

        The folder that holds the package is not used: it may hold other versions of the virtualenv's packages. A
        PYTHONPATH that the job was `given` comes first.
        """
        if self._folder is None:
            return {}
        folder = links / RUNTIME
        make_readable(folder)
        with suppress(FileExistsError):
            (folder / PACKAGE.name).symlink_to(PACKAGE)
        paths = [path for path in (given.get("PYTHONPATH"), str(folder)) if path]
        return {"PYTHONPATH": os.pathsep.join(paths)}

    def packages(self) -> str:
        """Return the interpreter and the packages, one per line."""
        if self._folder is None:
            return list_packages()
        return list_packages(
            read_pyvenv_config(self._folder).get("version", "?"),
            self.executable,
            tuple(site_packages(self._folder)),
        )


def python_for(environments: Mapping[str, Path], name: str | None) -> JobPython:
    """Return the environment of a job; InvalidInput, with the known ones, if there is no such environment."""
    if name is None:
        return JobPython(None)
    folder = environments.get(name)
    if folder is None:
        known = ", ".join(sorted(environments)) or "none: this platform has only its own Python"
        fix = f'an administrator adds {name} = "/path/to/virtualenv" to [jobs.environments] in falaj.toml'
        raise InvalidInput.at("environment", given=name, allowed=known, fix=fix)
    if not os.access(folder / "bin" / "python", os.X_OK):
        where = f"jobs.environments.{name}"
        raise InvalidInput.at(where, given=str(folder), allowed="a virtualenv, with bin/python")
    return JobPython(folder)


def image_for(images: Mapping[str, str], name: str) -> str:
    """Return the image of an environment on a cluster; InvalidInput, with the known ones, if there is none."""
    found = images.get(name)
    if found is None:
        known = ", ".join(sorted(images)) or "none: this platform has only the image kubernetes.image"
        fix = (
            f'an administrator adds {name} = "IMAGE@sha256:…" to [kubernetes.environments] in falaj.toml; falaj images '
            "build --environment FILE makes one"
        )
        raise InvalidInput.at("environment", given=name, allowed=known, fix=fix)
    return found


def describe_image(image: PodImage) -> str:
    """Return what is known of an image that a job ran in: its name, its digest, and its packages."""
    ran = f"# ran {image.ran}\n" if image.ran else ""
    return f"# image {image.reference}\n{ran}{image.packages}"


def packages_of(environments: Mapping[str, Path], name: str | None) -> bytes:
    """Return the packages that a job ran with, as far as they are still known."""
    try:
        return python_for(environments, name).packages().encode()
    except InvalidInput:
        return f"# the environment {name}, which falaj.toml no longer lists\n".encode()


def read_pyvenv_config(folder: Path) -> dict[str, str]:
    """Return the settings in pyvenv.cfg."""
    with suppress(OSError):
        lines = (folder / "pyvenv.cfg").read_text(errors="replace").splitlines()
        return {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}
    return {}


def site_packages(folder: Path) -> Iterator[str]:
    """Yield the folders of packages, including those in .pth files, without running the virtualenv's Python."""
    for site in sorted(folder.glob("lib/python3*/site-packages")):
        yield str(site)
        yield from (str(path) for path in linked_paths(site) if path.is_dir())


def linked_paths(site: Path) -> Iterable[Path]:
    for file in sorted(site.glob("*.pth")):
        with suppress(OSError):
            for line in file.read_text(errors="replace").splitlines():
                if line.strip() and not line.startswith(("#", "import ", "import\t")):
                    yield site / line.strip()
