"""Create the virtualenv and install Falaj into it. If it is interrupted, running it again continues.

Standard library only: it runs before anything is installed. pip's full output is kept in `.venv/install.log`.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
BAR_WIDTH = 30
STEPS = re.compile(
    r"^\s*(?P<what>Collecting|Processing|Downloading|Using cached|Building wheel for|Installing collected packages:) ?"
    r"(?:\S*/)?(?P<package>[A-Za-z0-9_.]+?(?:-[A-Za-z_.][\w.]*)*)(?=[-<>=!~;\[ (,]|$)"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the virtualenv is made")
    parser.add_argument("--extra", default="dev", help="the extra of pyproject.toml that is installed")
    arguments = parser.parse_args()
    try:
        return create_venv(arguments.venv) or install(arguments.venv, arguments.extra)
    except KeyboardInterrupt:
        print("\ninterrupted; run 'make setup' to continue", file=sys.stderr)
        return 130


def create_venv(venv: Path) -> int:
    """Make the virtualenv unless there is a working one; return the exit status."""
    if has_pip(venv):
        return 0
    if importlib.util.find_spec("ensurepip") is None:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        print(f"{sys.executable} cannot create virtualenvs. fix: apt install {package}", file=sys.stderr)
        return 1
    print(f"creating {venv.name}", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", str(venv)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        print(f"cannot create {venv}:\n{made.stdout}{made.stderr}", file=sys.stderr)
    return made.returncode


def has_pip(venv: Path) -> bool:
    """Whether the virtualenv is complete; one whose creation was interrupted has no pip."""
    python = venv / "bin" / "python"
    if not python.exists():
        return False
    return (
        subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    )


def install(venv: Path, extra: str) -> int:
    """Install Falaj with its pinned dependencies; return the exit status."""
    print(f"installing into {venv.name}, once; this takes a minute or two", flush=True)
    log, began = venv / "install.log", time.monotonic()
    command = [venv / "bin" / "python", "-u", "-m", "pip", "install", "--disable-pip-version-check"]
    command += [
        "--no-input",
        "--progress-bar",
        "off",
        "--constraint",
        CONSTRAINTS,
        "--editable",
        f"{ROOT}[{extra}]",
    ]
    with (
        log.open("w") as kept,
        subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pip,
    ):
        assert pip.stdout is not None
        show_progress(recorded(pip.stdout, kept))
        status = pip.wait()
    if status:
        show_failure(log)
        return status
    print(f"ready after {time.monotonic() - began:.0f} s")
    return 0


def recorded(lines: Iterable[str], log: object) -> Iterator[str]:
    """Yield `lines`, and write each to `log`."""
    for line in lines:
        print(line, end="", file=log, flush=True)  # type: ignore[call-overload]
        yield line


def show_progress(lines: Iterable[str]) -> None:
    """One line that is rewritten on a terminal, a line for every quarter of the packages elsewhere."""
    total = max(1, sum(1 for line in CONSTRAINTS.read_text().splitlines() if "==" in line))
    on_terminal, found, quarter = sys.stdout.isatty(), set[str](), 0
    for line in lines:
        step = STEPS.match(line)
        if step is None:
            continue
        if step["what"] in ("Collecting", "Processing"):
            found.add(step["package"].lower().replace("-", "_"))
        installing = step["what"].startswith("Installing")
        doing = f"installing {len(found)} packages" if installing else line.strip()[:60]
        share = min(1.0, len(found) / total)
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
