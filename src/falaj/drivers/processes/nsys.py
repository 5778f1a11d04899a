"""Runs the processes of an attempt under Nsight Systems, which writes a report for each to the outputs."""

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
"""Paths of its packages, for when it is not on the PATH."""
PROGRAM_FOLDERS = ("bin", "target-linux-x64", "target-linux-sbsa-armv8")
OPTIONS = ("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true")
"""Without CPU sampling, which the kernel rarely permits."""
NVTX_ENVIRONMENT = {"FALAJ_NVTX": "1"}
"""Makes `fit` mark its steps and their phases."""


def find_nsys(launch: Launch, *, root: Path = Path("/")) -> str | None:
    """Return the path of nsys if the launch requests it. Raise InvalidInput if it is not installed."""
    if not launch.nsys:
        return None
    found = shutil.which("nsys")
    if found is None:
        found = next((str(path) for place in INSTALL_PATTERNS for path in sorted(root.glob(place))), None)
    if found is None:
        from falaj.errors import InvalidInput  # loads pydantic, which would delay every start of a supervisor

        raise InvalidInput.at(
            "nsys",
            given="Nsight Systems is not installed on this machine",
            allowed="nsys on a machine that has the program on its PATH",
            fix="install the package nsight-systems-cli there, or submit the job without --nsys",
        )
    return str(Path(found).resolve())


def under_nsys(
    program: str | None, ranks: Sequence[Mapping[str, Any]], launch: Launch
) -> list[dict[str, Any]]:
    """Return the planned processes, each run by `program` if it is set."""
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
    """Return the folders that a process must be able to read to run nsys: its installation, unless that is in /usr."""
    if program is None or program.startswith("/usr/"):
        return []
    folder = Path(program).parent
    return [folder.parent if folder.name in PROGRAM_FOLDERS else folder]
