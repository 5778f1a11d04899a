"""What each image has: its packages, its settings and its labels; and the Dockerfile made of that. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from string import Template

from falaj.records.training.images import ImageKind
from falaj.version import VERSION

PREFIX = "/opt/falaj"
"""The virtualenv of an image."""
UID = 65532
"""The user of all images: the one that the pods of jobs run as."""
PASSWD = f"root:x:0:0:root:/:/sbin/nologin\nfalaj:x:{UID}:{UID}:falaj:/var/lib/falaj:/sbin/nologin\n"
GROUP = f"root:x:0:\nfalaj:x:{UID}:\n"
INSTALL = (
    *("--no-index", "--no-deps", "--require-hashes", "--no-compile", "--no-cache-dir"),
    *("--disable-pip-version-check", "--no-warn-script-location", "--root-user-action=ignore"),
)
"""How pip installs what is in the context, and nothing else."""
DEBIAN = "debian"
"""The base that is made from Debian packages."""


@dataclass(frozen=True)
class ImageRecipe:
    """One kind of image. Falaj itself is always in it: with its dependencies and those of `extras`, or without."""

    summary: str
    packages: tuple[str, ...] = ()
    extras: tuple[str, ...] | None = None
    command: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()

    def requirements(self, *, bare: bool) -> list[str]:
        """Return what pip resolves, besides what the environment of an image adds."""
        own = None if self.extras is None else f"falaj[{','.join(self.extras)}]=={VERSION}"
        return [each for each in (own, *(() if bare else self.packages)) if each]


RECIPES: dict[ImageKind, ImageRecipe] = {
    "platform": ImageRecipe(
        "the platform: API, controller and command line",
        extras=("hsm", "kubernetes"),
        command=("falaj", "up"),
        ports=(7480, 7481, 7482, 7483),
    ),
    "worker": ImageRecipe(
        "the worker, in which jobs run on Kubernetes",
        packages=(
            "cryptography",
            "numpy",
            "onnx",
            "onnxruntime",
            "onnxscript",
            "pyarrow",
            "pydantic",
            "torch",
        ),
        command=("python3", "-P", "-m", "falaj.drivers.kubernetes.worker"),
    ),
    "server": ImageRecipe(
        "the model server",
        extras=(),
        command=("python3", "-m", "falaj.apps.model_server", "0.0.0.0", "7481"),  # noqa: S104 - a pod's own
        ports=(7481, 7483),
    ),
}


@dataclass(frozen=True)
class ImageSettings:
    """The settings of one image, the same in a Dockerfile and in an archive that Falaj writes itself.

    `lock` is the text of its requirements; empty before they are resolved.
    """

    kind: ImageKind
    base: str
    lock: str

    @property
    def recipe(self) -> ImageRecipe:
        return RECIPES[self.kind]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/var/lib/falaj",
            "FALAJ_HOME": "/var/lib/falaj",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
        }

    @property
    def labels(self) -> dict[str, str]:
        return {
            "org.opencontainers.image.title": f"falaj-{self.kind}",
            "org.opencontainers.image.description": f"Falaj: {self.recipe.summary}",
            "org.opencontainers.image.version": VERSION,
            "org.opencontainers.image.licenses": "Apache-2.0",
            "org.opencontainers.image.base.name": self.base,
            "dev.falaj.kind": self.kind,
            "dev.falaj.python": python_version(),
        } | ({"dev.falaj.lock": f"sha256:{sha256(self.lock.encode()).hexdigest()}"} if self.lock else {})

    def config(self) -> dict[str, object]:
        """Return the settings as the `config` of an OCI image."""
        return {
            "User": f"{UID}:{UID}",
            "Env": [f"{name}={value}" for name, value in self.environment.items()],
            "Cmd": list(self.recipe.command),
            "WorkingDir": "/",
            "Labels": self.labels,
            "ExposedPorts": {f"{port}/tcp": {} for port in self.recipe.ports},
        }


def render_dockerfile(settings: ImageSettings) -> str:
    """Return the Dockerfile of an image."""
    template = Template(files("falaj.assembly.images").joinpath("Dockerfile").read_text())
    return template.substitute(
        kind=settings.kind,
        version=VERSION,
        python=python_version(),
        prefix=PREFIX,
        context=", ".join(context_parts(settings.base)),
        base=_base_stage(settings.base),
        install=json.dumps(INSTALL)[1:-1],
        settings="\n".join(_settings_lines(settings)),
    )


def context_parts(base: str) -> list[str]:
    """Return the names of what a build context has besides its Dockerfile."""
    return [
        *(["base.tar"] if base == DEBIAN else []),
        *("wheels/", "requirements.txt", "pip/", "passwd", "group"),
    ]


def _base_stage(base: str) -> str:
    if base == DEBIAN:
        return "FROM scratch AS base\nADD base.tar /\n"
    return f"ARG BASE={base}\nFROM ${{BASE}} AS base\nUSER 0:0\n"


def _settings_lines(settings: ImageSettings) -> Sequence[str]:
    lines = [f"ENV {name}={json.dumps(value)}" for name, value in settings.environment.items()]
    lines += [f"LABEL {name}={json.dumps(value)}" for name, value in settings.labels.items()]
    lines += [f"EXPOSE {port}" for port in settings.recipe.ports]
    return [
        *lines,
        f"USER {UID}:{UID}",
        "WORKDIR /",
        "ENTRYPOINT []",
        f"CMD {json.dumps(settings.recipe.command)}",
    ]


def python_version() -> str:
    """Return the version of Python that images have: the one that runs now, so that the lock is for both."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
