"""One process of an attempt, as a launch contract plans it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from falaj.ports.launcher import Launch

LOOPBACK = "127.0.0.1"

PortAllocator = Callable[[int], Sequence[int]]
"""That many ports on which nobody listens."""


@dataclass(frozen=True)
class PlannedProcess:
    """A command, and the variables that it has alone.

    `name` is what people call it ("rank 1", "ps 0"); it is empty for a program that starts the ranks itself. The
    attempt has ended when all processes that decide have; what is left then is killed, whatever it makes of that.
    """

    command: Sequence[str]
    name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    is_essential: bool = True


def rank_environment(rank: int, *, of: int) -> dict[str, str]:
    """The rank, as copies of a plain command are told it."""
    return {"FALAJ_RANK": str(rank), "FALAJ_WORLD_SIZE": str(of)}


def rank_gpu_environment(launch: Launch, rank: int, *, of: int) -> dict[str, str]:
    """Nothing where the GPUs do not divide evenly: every rank sees all of them then."""
    each, rest = divmod(len(launch.gpus), of)
    if each == 0 or rest:
        return {}
    own = launch.gpus[rank * each : (rank + 1) * each]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def addresses(ports: Sequence[int]) -> list[str]:
    return [f"{LOOPBACK}:{port}" for port in ports]
