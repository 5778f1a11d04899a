"""One process of an attempt, as a launch contract plans it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from falaj.ports.launcher import Launch

LOOPBACK = "127.0.0.1"

PortAllocator = Callable[[int], Sequence[int]]
"""Returns the given number of free ports."""


@dataclass(frozen=True)
class PlannedProcess:
    """A command and its own variables.

    `name` is shown to people ("rank 1", "ps 0"); it is empty for a launcher that starts the ranks itself. The attempt
    ends when all essential processes have ended; the others are killed then, and their exit status does not matter.
    """

    command: Sequence[str]
    name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    is_essential: bool = True


def rank_environment(rank: int, *, of: int) -> dict[str, str]:
    """Return the variables of Falaj for one rank."""
    return {"FALAJ_RANK": str(rank), "FALAJ_WORLD_SIZE": str(of)}


def rank_gpu_environment(launch: Launch, rank: int, *, of: int) -> dict[str, str]:
    """Return the GPUs of one rank; empty if they do not divide evenly: every rank sees all of them then."""
    each, rest = divmod(len(launch.gpus), of)
    if each == 0 or rest:
        return {}
    own = launch.gpus[rank * each : (rank + 1) * each]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def addresses(ports: Sequence[int]) -> list[str]:
    return [f"{LOOPBACK}:{port}" for port in ports]
