"""What a run shows of itself when it is asked to: a profile of some steps, NVTX ranges, TensorBoard's event files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from falaj.training.runtime.agent.job import job
from falaj.training.runtime.errors import TrainingFault

PROFILED_STEPS = 20
NVTX = "FALAJ_NVTX"
"""Set in the environment by who wraps a rank in Nsight Systems."""

ProfileChoice: TypeAlias = bool | int | Literal["nvtx"]
"""True: 20 steps; a number: so many; nvtx: ranges for Nsight Systems around every step."""


@dataclass(frozen=True, kw_only=True)
class ReportingOptions:
    """`run` is where the run is kept, if that is a folder."""

    profile: ProfileChoice = False
    tensorboard: str | Path | bool = False
    run: object = None

    def faults(self) -> list[TrainingFault]:
        profile, faults = self.profile, []
        if profile == "nvtx" and not nvtx_is_there():
            given = "nvtx, with a torch that was built without CUDA"
            faults.append(
                TrainingFault("profile", given, "nvtx where CUDA is; True anywhere", "profile=True")
            )
        elif profile != "nvtx" and (not isinstance(profile, int) or profile < 0):
            faults.append(
                TrainingFault("profile", profile, "True, a number of steps, or nvtx", "profile=True")
            )
        if not isinstance(self.tensorboard, bool | str | Path):
            faults.append(
                TrainingFault("tensorboard", self.tensorboard, "True, or a folder", "tensorboard=True")
            )
        return faults

    @property
    def profiled_steps(self) -> int:
        """How many steps are to be profiled; 0 for none."""
        if self.profile == "nvtx":
            return 0
        return PROFILED_STEPS if self.profile is True else int(self.profile)

    @property
    def has_nvtx(self) -> bool:
        """Whether Nsight Systems is to see the parts of a step."""
        asked = os.environ.get(NVTX, "") not in ("", "0")
        return self.profile == "nvtx" or (asked and nvtx_is_there())

    @property
    def events_folder(self) -> Path | None:
        """Where TensorBoard's event files go; none if nobody wants them."""
        if self.tensorboard is False:
            return None
        return self.folder / "tensorboard" if self.tensorboard is True else Path(self.tensorboard)

    @property
    def folder(self) -> Path:
        """Where what is made goes: the folder of the run, or the outputs of the job."""
        return Path(self.run) if isinstance(self.run, str | Path) else job.outputs


def nvtx_is_there() -> bool:
    return torch.version.cuda is not None
