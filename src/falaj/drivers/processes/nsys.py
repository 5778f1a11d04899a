"""Nsight Systems around the processes of an attempt: each writes a report among the attempt's outputs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from falaj.ports.launcher import Launch

INSTALL_PATTERNS = (
    "opt/nvidia/nsight-systems*/**/bin/nsys",
    "opt/nvidia/nsight-systems*/nsys",
    "usr/local/cuda/bin/nsys",
)
"""Where its packages put it, if it is not on the path."""
PROGRAM_FOLDERS = ("bin", "target-linux-x64", "target-linux-sbsa-armv8")
OPTIONS = ("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true")
"""Without samples of the CPU, which the kernel gives to few."""
NVTX_ENVIRONMENT = {"FALAJ_NVTX": "1"}
"""Has `fit` mark its steps, and the parts of each."""


def find_nsys(launch: Launch, *, root: Path = Path("/")) -> str | None:
    """The program, if the launch asks for it; InvalidInput where it is not installed."""
    if not launch.nsys:
        return None
    found = shutil.which("nsys")
    if found is None:
        found = next((str(path) for place in INSTALL_PATTERNS for path in sorted(root.glob(place))), None)
    if found is None:
        from falaj.errors import InvalidInput  # not for the shim: pydantic would slow every start

        raise InvalidInput.at(
            "nsys",
            given="Nsight Systems is not installed on this machine",
            allowed="a job with nsys on a machine that has the program nsys on its path",
            fix="install the package nsight-systems-cli there, or submit the job without --nsys",
        )
    return str(Path(found).resolve())


def under_nsys(
    program: str | None, ranks: Sequence[Mapping[str, Any]], launch: Launch
) -> list[dict[str, Any]]:
    """The planned processes, each under `program`, if there is one."""
    if program is None:
        return [dict(each) for each in ranks]
    outputs = launch.directory.absolute() / "outputs"
    starts_others = len(ranks) < launch.processes
    return [
        {
            **each,
            "command": [
                program,
                "profile",
                *OPTIONS,
                f"--output={outputs / ('all-ranks' if starts_others else f'rank-{place}')}",
                *each["command"],
            ],
        }
        for place, each in enumerate(ranks)
    ]


def nsys_folders(program: str | None) -> list[Path]:
    """What a process must be able to read to run it: where it is installed, unless that is with the system."""
    if program is None or program.startswith("/usr/"):
        return []
    folder = Path(program).parent
    return [folder.parent if folder.name in PROGRAM_FOLDERS else folder]
