"""The packages of an image as a layer, without a container builder: what the Dockerfile does, done here."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from falaj.assembly.images.archives import write_layer
from falaj.assembly.images.context import BuildContext
from falaj.assembly.images.debian import compile_tree
from falaj.assembly.images.kinds import GROUP, INSTALL, PASSWD, PREFIX, python_version
from falaj.assembly.images.programs import Report, run_program
from falaj.errors import Unavailable

PYTHON = "/usr/bin/python3"
"""The Python of the base that is made from Debian packages."""


def write_packages(target: Path, context: BuildContext, report: Report) -> None:
    """Write the layer with the virtualenv of an image; its Python is that of the base."""
    root = target.with_name("packages")
    folder = root / PREFIX.lstrip("/")
    folder.parent.mkdir(parents=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], context, report)
    inside = ("--find-links", str(context.wheels), "--requirement", str(context.requirements))
    _run([str(folder / "bin/python3"), "-m", "pip", "install", *INSTALL, *inside], context, report)
    report("compiling the packages")
    compile_tree(folder / "lib", root=root)
    relocate(folder)
    shutil.copy(context.requirements, folder / "requirements.txt")
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text(PASSWD)
    (root / "etc/group").write_text(GROUP)
    write_layer(target, root)
    shutil.rmtree(root)


def relocate(folder: Path) -> None:
    """Make a virtualenv of this machine one of the image: its Python, its place, and the programs in it."""
    for name in ("python", "python3", f"python{python_version()}"):
        (folder / "bin" / name).unlink(missing_ok=True)
        (folder / "bin" / name).symlink_to(PYTHON)
    (folder / "pyvenv.cfg").write_text(
        f"home = {os.path.dirname(PYTHON)}\ninclude-system-site-packages = false\nversion = {python_version()}\n"
    )
    for program in sorted((folder / "bin").iterdir()):
        if program.name.lower().startswith("activate"):
            program.unlink()
        elif not program.is_symlink():
            program.write_bytes(with_interpreter(program.read_bytes()))


def with_interpreter(script: bytes) -> bytes:
    """Return a program of a virtualenv with the first line that it needs in the image; others stay as they are.

    Where the path of an interpreter is long or has spaces, pip writes three lines for a shell instead of one.
    """
    line = f"#!{PREFIX}/bin/python3\n".encode()
    first, _, rest = script.partition(b"\n")
    if first == b"#!/bin/sh" and rest.startswith(b"'''exec'"):
        return line + rest.partition(b"' '''\n")[2]
    return line + rest if first.startswith(b"#!") and b"python" in first else script


def _run(command: list[str], context: BuildContext, report: Report) -> None:
    own = {"PYTHONPATH": str(context.folder), "PYTHONDONTWRITEBYTECODE": "1", "PIP_CONFIG_FILE": os.devnull}
    done = run_program(command, report, environment=own)
    if done.code:
        raise Unavailable(f"the packages cannot be installed: {' '.join(done.lines[-4:])[:1000]}")
