"""Baseline placement policies for the placement benchmark, each as commonly described.

All but first-fit choose the node with the lowest score, the first one on ties; a shared GPU is chosen by best fit.
Fractions are of the largest node's CPUs and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from falaj.records.scheduling.snapshot import WHOLE_GPU, Demand
from falaj.scheduling.placement.fleet import Flags, Fleet, GpuAssignment, first_gpus

Floats = npt.NDArray[np.float64]
Score = Callable[[Fleet, Demand, Flags], Floats]


class FirstFit:
    """The first node that can start the task, and its first fitting GPUs."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def choose(self, demand: Demand) -> GpuAssignment | None:
        gpus = self.fleet.fitting_gpus(demand)
        nodes = np.flatnonzero(self.fleet.fitting_nodes(demand, gpus))
        return GpuAssignment(int(nodes[0]), first_gpus(gpus[nodes[0]], demand.gpus)) if nodes.size else None


class LowestScore:
    """The node with the lowest score among those that can start the task."""

    def __init__(self, fleet: Fleet, score: Score) -> None:
        self.fleet, self.score = fleet, score

    def choose(self, demand: Demand) -> GpuAssignment | None:
        gpus = self.fleet.fitting_gpus(demand)
        nodes = self.fleet.fitting_nodes(demand, gpus)
        if not nodes.any():
            return None
        node = int(np.where(nodes, self.score(self.fleet, demand, gpus), np.inf).argmin())
        return GpuAssignment(node, tightest_gpus(self.fleet, node, gpus[node], demand))


def tightest_gpus(fleet: Fleet, node: int, fitting: Flags, demand: Demand) -> tuple[int, ...]:
    """Return the fitting GPUs of `node` with the least free."""
    found = np.flatnonzero(fitting)
    order = found[np.argsort(fleet.gpus[node, found], kind="stable")]
    return tuple(int(gpu) for gpu in order[: demand.gpus])


# ------------------------------------------------------------------------------------------------- scores


def best_fit(fleet: Fleet, demand: Demand, gpus: Flags) -> Floats:
    """The node that is left with the least, half by CPUs and half by GPUs, as the authors of openb weigh them."""
    return free_cpus(fleet) + free_gpus(fleet)


def best_fit_by_gpus(fleet: Fleet, demand: Demand, gpus: Flags) -> Floats:
    """The node with the fewest free GPUs, then the fewest free CPUs: stronger than the weighted sum on openb."""
    return free_gpus(fleet) * 1e6 + free_cpus(fleet)


def smallest_dot_product(fleet: Fleet, demand: Demand, gpus: Flags) -> Floats:
    """The smallest dot product of demand and free resources, as the authors of openb run it."""
    demanded_cpus = demand.cpus_milli / max(int(fleet.all_cpus.max()), 1)
    product: Floats = free_cpus(fleet) * demanded_cpus + free_gpus(fleet) * demanded_gpus(fleet, demand)
    return product


def largest_dot_product(fleet: Fleet, demand: Demand, gpus: Flags) -> Floats:
    """The same, the largest first: the alignment of Tetris."""
    turned: Floats = -smallest_dot_product(fleet, demand, gpus)
    return turned


def packing(fleet: Fleet, demand: Demand, gpus: Flags) -> Floats:
    """GPUs in use first, the tightest; then free GPUs on a node in use; then idle nodes, the one with fewest GPUs."""
    idle = (fleet.gpus == fleet.all_gpus).all(axis=1)
    if not demand.gpus:
        return np.asarray(idle & (fleet.cpus == fleet.all_cpus), np.float64)
    tightest = np.where(gpus, fleet.gpus, WHOLE_GPU).min(axis=1)
    untouched = (fleet.gpus == WHOLE_GPU).sum(axis=1)
    on_free_gpus = np.where(idle, 2.0, 1.0) * WHOLE_GPU + untouched
    return np.asarray(np.where(tightest < WHOLE_GPU, tightest, on_free_gpus), np.float64)


def free_cpus(fleet: Fleet) -> Floats:
    found: Floats = fleet.cpus / max(int(fleet.all_cpus.max()), 1)
    return found


def free_gpus(fleet: Fleet) -> Floats:
    found: Floats = fleet.gpus.sum(axis=1) / most_gpus(fleet)
    return found


def demanded_gpus(fleet: Fleet, demand: Demand) -> float:
    return demand.gpus * demand.gpu_milli / most_gpus(fleet)


def most_gpus(fleet: Fleet) -> int:
    return int(fleet.gpus.shape[1]) * WHOLE_GPU
