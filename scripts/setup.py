"""Create the virtualenv or mend it, and install Falaj into it. If it is interrupted, running it again continues.

Standard library only: it runs before anything is installed. pip's full output is kept in `.venv/install.log`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BAR_WIDTH = 30
STEPS = re.compile(
    r"^\s*(?P<what>Collecting|Processing|Downloading|Using cached|Building wheel for|Requirement already satisfied:|"
    r"Installing collected packages:) ?"
    r"(?:\S*/)?(?P<package>[A-Za-z0-9_.]+?(?:-[A-Za-z_.][\w.]*)*)(?=[-<>=!~;\[ (,]|$)"
)
INTERPRETER = re.compile(r"^(?:#!|'''exec' \"?)(/[^\"\n]*)/bin/python", re.MULTILINE)
"""The virtualenv in the first lines of its scripts; long paths stand in the second line."""


class Extra(NamedTuple):
    """An extra of pyproject.toml: what it is for, and what pip finds and downloads for it, without torch."""

    title: str
    packages: int
    download_mb: int


# Measured on x86-64 with Python 3.11; the sizes of wheels are in `.venv/install.log`.
EXTRAS = {
    "demo": Extra("what the demonstration needs", 128, 310),
    "dev": Extra("what the tests need", 245, 590),
}
TORCH_MB = {"CPU": 190, "CUDA": 2730}
PACKAGE_S, MB_PER_S = 0.5, 40
"""Rough time of an installation, on two cores and a fast network."""


class Shortfall(NamedTuple):
    """Why something must be installed, and how much will be downloaded; None where most of it is there already."""

    reason: str
    download_mb: int | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the virtualenv is made")
    parser.add_argument("--extra", default="dev", choices=EXTRAS, help="the extra that is installed")
    arguments = parser.parse_args()
    try:
        return prepare(arguments.venv, arguments.extra)
    except KeyboardInterrupt:
        print("\ninterrupted; run 'make setup' to continue", file=sys.stderr)
        return 130


def prepare(venv: Path, extra: str) -> int:
    """Make, mend or complete the virtualenv where that is needed; return the exit status."""
    if damage := find_damage(venv):
        print(
            f"creating {venv.name}" if not venv.exists() else f"{venv.name} {damage}: creating it anew",
            flush=True,
        )
        if status := create_venv(venv):
            return status
    shortfall = find_shortfall(venv, extra)
    return 0 if shortfall is None else install(venv, extra, shortfall)


# ------------------------------------------------------------------------------------- the virtualenv


def find_damage(venv: Path) -> str | None:
    """Return why the virtualenv cannot be used, in words that follow its name; None if it can."""
    if not venv.exists():
        return "does not exist"
    python = venv / "bin" / "python"
    if not python.exists():
        return "has lost the Python that it was made with" if python.is_symlink() else "is not complete"
    origin = find_origin(venv)
    if origin is not None and not (origin.exists() and origin.samefile(venv)):
        return f"was {'copied' if origin.exists() else 'moved'} from {origin}"
    started = subprocess.run([python, "-c", "import pip"], capture_output=True, check=False)
    return "is not complete, or its Python was replaced" if started.returncode else None


def find_origin(venv: Path) -> Path | None:
    """Return the folder for which the scripts of the virtualenv were written."""
    for script in (venv / "bin" / "falaj", venv / "bin" / "pip"):
        if script.exists() and (written := INTERPRETER.search(script.read_text(errors="replace")[:1000])):
            return Path(written[1])
    return None


def create_venv(venv: Path) -> int:
    """Make an empty virtualenv; return the exit status."""
    if importlib.util.find_spec("ensurepip") is None:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        print(f"{sys.executable} cannot create virtualenvs. fix: apt install {package}", file=sys.stderr)
        return 1
    # The Python of the virtualenv itself, which may run this, goes when the virtualenv is cleared.
    own = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = str(own) if sys.prefix != sys.base_prefix and own.exists() else sys.executable
    command = [python, "-m", "venv", "--clear", str(venv)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        print(f"cannot create {venv}:\n{made.stdout}{made.stderr}", file=sys.stderr)
    return made.returncode


# ---------------------------------------------------------------------------------- what is installed


def find_shortfall(venv: Path, extra: str, root: Path = ROOT) -> Shortfall | None:
    """Return what the virtualenv lacks; None if nothing."""
    falaj = find_distribution(venv, "falaj")
    if falaj is None:
        return Shortfall("", EXTRAS[extra].download_mb)
    checkout = (json.loads(falaj.read_text("direct_url.json") or "{}")).get("url", "")
    if checkout != root.as_uri():
        return Shortfall(f"has the Falaj of {checkout.removeprefix('file://') or 'an index'}", None)
    wanted = requirement_digests(root)
    recorded = {name: read_stamp(venv, name) for name in EXTRAS}
    sufficient = [recorded["dev"]] if extra == "dev" else [recorded["dev"], recorded["demo"]]
    if wanted in sufficient:
        return None
    if recorded["demo"] == wanted:
        return Shortfall("", EXTRAS["dev"].download_mb - EXTRAS["demo"].download_mb)
    last = next((digests for digests in sufficient if digests), None)
    if last is None:
        return Shortfall("was not installed to the end", None)
    changed = " and ".join(name for name in wanted if wanted[name] != last.get(name))
    return Shortfall(f"is older than {changed}", None)


def find_distribution(venv: Path, name: str) -> Distribution | None:
    folders = [str(folder) for folder in venv.glob("lib/python*/site-packages")]
    return next(iter(distributions(name=name, path=folders)), None)


def requirement_digests(root: Path) -> dict[str, str]:
    """Return a digest of what is installed by each file; settings of tools do not count."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    parts = {key: project.get(key) for key in ("build-system", "project")}
    contents = {
        "pyproject.toml": json.dumps(parts, sort_keys=True).encode(),
        "constraints.txt": (root / "constraints.txt").read_bytes(),
    }
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def stamp(venv: Path, extra: str) -> Path:
    """The file that is written when an extra was installed to the end."""
    return venv / f".installed-{extra}"


def read_stamp(venv: Path, extra: str) -> dict[str, str] | None:
    try:
        return dict(json.loads(stamp(venv, extra).read_text()))
    except (OSError, ValueError):
        return None


# ------------------------------------------------------------------------------------ the installation


def install(venv: Path, extra: str, shortfall: Shortfall, root: Path = ROOT) -> int:
    """Install Falaj with its pinned dependencies; return the exit status."""
    began, log, wanted = time.monotonic(), venv / "install.log", requirement_digests(root)
    torch = choose_torch(venv, root) if extra == "dev" else None
    print(announce(venv, extra, shortfall, torch), flush=True)
    for name in EXTRAS:  # an installation that is interrupted may leave packages half replaced
        stamp(venv, name).unlink(missing_ok=True)
    command = [
        venv / "bin" / "python",
        "-u",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += [
        "--progress-bar",
        "off",
        "--constraint",
        root / "constraints.txt",
        "--editable",
        f"{root}[{extra}]",
    ]
    command += [] if torch is None else [f"torch=={torch}"]
    with (
        log.open("w") as kept,
        subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pip,
    ):
        assert pip.stdout is not None
        show_progress(recorded(pip.stdout, kept), EXTRAS[extra].packages)
        status = pip.wait()
    if status:
        show_failure(log)
        return status
    stamp(venv, extra).write_text(json.dumps(wanted))
    print(f"ready after {time.monotonic() - began:.0f} s")
    return 0


def announce(venv: Path, extra: str, shortfall: Shortfall, torch: str | None) -> str:
    """Return what will be installed and why, how much is downloaded for it, and about how long it takes."""
    build = None if torch is None else "CPU" if torch.endswith("+cpu") else "CUDA"
    if shortfall.download_mb is None:
        build_words = f", with torch's {build} build" if build else ""
        return f"{venv.name} {shortfall.reason}: installing what is missing{build_words}"
    size = shortfall.download_mb + (TORCH_MB[build] if build else 0)
    spelled = f"{size / 1000:.1f} GB" if size >= 1000 else f"{size} MB"
    words = f"installing {EXTRAS[extra].title} into {venv.name}, once: about {spelled} to download"
    if build:
        words += f" with torch's {build} build"
    if build == "CUDA":
        words += " (README.md says how to get the CPU build)"
    minutes = max(1, round((EXTRAS[extra].packages * PACKAGE_S + size / MB_PER_S) / 60))
    return f"{words}, {minutes} to {2 * minutes + 1} minutes"


def choose_torch(venv: Path, root: Path) -> str | None:
    """Return the version of torch to install; None if the virtualenv has one that fits."""
    pinned = re.search(r"^torch==([^\s;+]+)", (root / "constraints.txt").read_text(), re.MULTILINE)
    present = find_distribution(venv, "torch")
    if pinned is None or (present is not None and present.version.partition("+")[0] == pinned[1]):
        return None
    return choose_build(pinned[1], list_versions(venv, "torch"), nvidia=has_nvidia_driver())


def choose_build(pinned: str, versions: Sequence[str], *, nvidia: bool) -> str:
    """Return the CPU build where there is no NVIDIA driver and pip finds one; else what pip prefers."""
    builds = [version for version in versions if version.partition("+")[0] == pinned]
    cpu = f"{pinned}+cpu"
    return cpu if cpu in builds and not nvidia else max(builds, default=pinned)


def list_versions(venv: Path, package: str) -> list[str]:
    """Return the versions in the indexes and folders that pip is configured with; nothing is downloaded."""
    command = [
        venv / "bin" / "python",
        "-m",
        "pip",
        "index",
        "versions",
        package,
        "--disable-pip-version-check",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^Available versions: (.+)$", shown.stdout, re.MULTILINE)
    return found[1].split(", ") if found else []


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def recorded(lines: Iterable[str], log: object) -> Iterator[str]:
    """Yield `lines`, and write each to `log`."""
    for line in lines:
        print(line, end="", file=log, flush=True)  # type: ignore[call-overload]
        yield line


def show_progress(lines: Iterable[str], total: int) -> None:
    """One line that is rewritten on a terminal, a line for every quarter of the packages elsewhere."""
    on_terminal, found, quarter = sys.stdout.isatty(), set[str](), 0
    for line in lines:
        step = STEPS.match(line)
        if step is None:
            continue
        if step["what"] in ("Collecting", "Processing", "Requirement already satisfied:"):
            found.add(step["package"].lower().replace("-", "_"))
        total = max(total, len(found))
        installing = step["what"].startswith("Installing")
        doing = f"installing {len(found)} packages" if installing else line.strip()[:60]
        share = len(found) / total
        if on_terminal:
            filled = "#" * int(share * BAR_WIDTH)
            print(
                f"\r\033[K  [{filled:<{BAR_WIDTH}}] {len(found):>3} of {total}  {doing}", end="", flush=True
            )
        elif int(share * 4) > quarter or installing:
            quarter = int(share * 4)
            print(
                f"  {len(found)} of about {total} packages{': installing' if installing else ''}", flush=True
            )
    if on_terminal:
        print("\r\033[K", end="", flush=True)


def show_failure(log: Path) -> None:
    """Print the end of pip's output, without its warnings about locations."""
    lines = [line for line in log.read_text().splitlines() if not line.startswith("WARNING: Location")]
    print("\n".join(lines[-15:]), file=sys.stderr)
    print(f"the installation failed; all of pip's output: {log}", file=sys.stderr)
    print(
        "  fix   mend what it names, then run 'make setup' again: what was downloaded is kept",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
