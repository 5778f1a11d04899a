"""Build the wheel twice, install it without extras in a clean virtualenv per Python, and run the tutorial there.

Standard library only. Each step prints its wall-clock time and the CPU time of the processes that it waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from tutorial_steps import BlockFailed, environment_of, run_tutorial  # noqa: E402 - it lies beside the tests

OLDEST = (3, 11)
SOURCES = ("src", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", ".gitignore")
"""What the wheel is made of."""
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")
VERSION_OF = "import os, sys; print(*sys.version_info[:2], os.path.realpath(sys._base_executable))"


class StepFailed(Exception):
    """A command ended with an error, or printed something else than expected."""


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--python", type=Path, nargs="+", metavar="PATH", help="default: the one that runs this"
    )
    parser.add_argument(
        "--all", action="store_true", help="every Python from 3.11 on that is found, see --list"
    )
    parser.add_argument("--list", action="store_true", help="print the Pythons that --all checks, and end")
    arguments = parser.parse_args(given)
    if arguments.list:
        print(*find_pythons(), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the platform that runs here is stopped
    pythons = find_pythons() if arguments.all else arguments.python or [Path(sys.executable)]
    try:
        with tempfile.TemporaryDirectory(prefix="falaj-wheel-") as folder:
            wheel = build_twice(Path(folder))
            for number, python in enumerate(pythons):
                check(wheel, python, Path(folder) / str(number))
    except (StepFailed, BlockFailed) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


def find_pythons() -> list[Path]:
    """Return the system's Python, the others from 3.11 on of PATH and pyenv, and those of FALAJ_TEST_PYTHONS."""
    folders = [Path("/usr/bin"), *map(Path, filter(None, os.environ.get("PATH", "").split(os.pathsep)))]
    folders += sorted((Path.home() / ".pyenv" / "versions").glob("*/bin"))
    candidates = [
        folder / name
        for folder in folders
        if folder.is_dir()
        for name in sorted(path.name for path in folder.iterdir())
        if re.fullmatch(r"python3(\.\d+)?", name)
    ]
    candidates += map(Path, filter(None, os.environ.get("FALAJ_TEST_PYTHONS", "").split(os.pathsep)))
    known = dict[Path, Path]()
    for candidate in candidates:
        program = known_python(candidate)
        if program is not None:
            known.setdefault(program, program)
    return list(known)


def known_python(candidate: Path) -> Path | None:
    """Return the program behind a link, a shim or a virtualenv; none if it does not start or is too old."""
    try:
        asked = subprocess.run(
            [candidate, "-I", "-c", VERSION_OF], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode:
        return None
    major, minor, program = asked.stdout.split(maxsplit=2)
    return Path(program.strip()) if (int(major), int(minor)) >= OLDEST else None


def build_twice(folder: Path) -> Path:
    """Build the wheel here, and from a copy with other times and modes; return it if both have the same bytes."""
    with timed("build the wheel"):
        wheel = build(ROOT, folder / "wheel")
    with timed("build it again from a copy: the same bytes"):
        copy = folder / "copy"
        copy.mkdir()
        for name in SOURCES:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, copy / name)
        for path in (copy / "src").rglob("*.py"):
            path.chmod(0o600)
            os.utime(path, (0, 1_000_000_000))
        again = build(copy, folder / "again")
        if (again.name, again.read_bytes()) != (wheel.name, wheel.read_bytes()):
            raise StepFailed(f"two builds of {wheel.name} differ")
        shutil.rmtree(copy)
    return wheel


def build(source: Path, target: Path) -> Path:
    run([sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", target, source])
    (wheel,) = target.glob("falaj-*.whl")
    return wheel


def check(wheel: Path, python: Path, folder: Path) -> None:
    """Install the wheel for a Python, and run everything that a newcomer types, each in an empty folder."""
    folder.mkdir()
    version = run([python, "-c", "import platform; print(platform.python_version())"]).strip()
    print(f"Python {version}, {python}", flush=True)
    with timed("virtualenv"):
        programs = create_venv(python, folder) / "bin"
    with timed("install"):
        # Modules are compiled as they are imported: less than a tenth of those that are installed.
        options = ("--no-compile", "--constraint", ROOT / "constraints.txt")
        run([programs / "python", *PIP, "install", *options, wheel])
    environment = environment_of(programs, folder)
    for command in ("falaj --version", "python -m falaj --help", "falaj doctor"):
        with timed(command), empty(folder) as place:
            run(command.split(), cwd=place, env=environment)
    with timed("README's Python"), empty(folder) as place:
        run(["python", "-c", readme_python()], cwd=place, env=environment)
    with empty(folder) as place:
        follow_tutorial(place, environment)
    shutil.rmtree(folder)


def create_venv(python: Path, folder: Path) -> Path:
    """Make a virtualenv, with the package virtualenv where this Python has no ensurepip, or one without wheels."""
    venv = folder / "venv"
    if subprocess.run([python, "-m", "venv", venv], capture_output=True, check=False).returncode == 0:
        return venv
    tool = folder / "virtualenv"
    run([sys.executable, *PIP, "install", "--target", tool, "virtualenv"])
    made = [sys.executable, "-m", "virtualenv", "--quiet", "--clear", "--python", python, venv]
    run(made, env={**os.environ, "PYTHONPATH": str(tool)})
    return venv


def readme_python() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(block)


def follow_tutorial(folder: Path, environment: Mapping[str, str]) -> None:
    with closing(
        run_tutorial(folder, environment)
    ) as blocks:  # which ends the platform while its folder is there
        began = now()
        for text in blocks:
            report("; ".join(text.splitlines())[:100], began)
            if "falaj up" in text:
                with timed("console"):
                    open_console(folder, environment)
            began = now()


def open_console(folder: Path, environment: Mapping[str, str]) -> None:
    """Fetch the first page of the console, once it listens: the platform starts it after its API."""
    url, deadline = None, time.monotonic() + 60
    while url is None and time.monotonic() < deadline:
        url = json.loads(run(["falaj", "--json", "status"], cwd=folder, env=environment))["console"]
    if url is None:
        raise StepFailed("falaj status names no console")
    address = f"{url}/signin"
    try:
        with urllib.request.urlopen(address, timeout=60) as page:  # noqa: S310 - the platform's own address
            if b"Falaj" not in page.read():
                raise StepFailed(f"{address} is not the console")
    except OSError as error:
        raise StepFailed(f"{address}: {error}") from error


def run(
    command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    words = [str(word) for word in command]
    if env is not None:  # found where the environment says, not where this process would look
        words[0] = shutil.which(words[0], path=env.get("PATH")) or words[0]
    ran = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise StepFailed(f"{' '.join(words)[:300]} ended with {ran.returncode}\n{ran.stdout}\n{ran.stderr}")
    return ran.stdout


@contextmanager
def empty(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        yield Path(made)


@contextmanager
def timed(step: str) -> Iterator[None]:
    began = now()
    yield
    report(step, began)


def now() -> tuple[float, float]:
    """Return the clock, and the CPU seconds of the children that have ended."""
    times = os.times()
    return time.monotonic(), times.children_user + times.children_system


def report(step: str, began: tuple[float, float]) -> None:
    wall_s, cpu_s = (after - before for after, before in zip(now(), began, strict=True))
    print(f"  {wall_s:6.1f} s  {cpu_s:6.1f} CPU s  {step}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
