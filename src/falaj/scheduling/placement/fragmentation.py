"""GPU fragmentation: the free GPUs that a task drawn from a workload cannot use.

On a node that can start it, a task can use the free part of every GPU that holds its request; on other nodes nothing.
The rest is fragmented for that task. The mean over the workload's tasks is the node's fragmentation, as defined by the
paper of the openb trace. For tasks without GPUs, all free GPUs are fragmented.

All values are integers below 2**53, stored as floats for fast products: sums are exact in any order, so equal states
compare equal on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from falaj.records.scheduling.snapshot import WHOLE_GPU, Demand
from falaj.scheduling.placement.fleet import Fleet, Ints

Floats = npt.NDArray[np.float64]


class DemandKind(NamedTuple):
    """The GPU part of a demand; many combinations of CPU and memory share one kind."""

    gpus: int
    milli: int
    models: frozenset[str] | None


class FragmentationMeasure:
    """The fragmentation of a fleet for a workload: demands with weights.

    The `reach` of a kind on a node is the sum of the free parts of the GPUs that hold its request; the kind fits if
    that is at least its total request. So a node is reduced to one number for each kind, a sum over its GPUs.
    """

    def __init__(self, fleet: Fleet, workload: Mapping[Demand, int]) -> None:
        self.fleet = fleet
        self.total_weight = sum(workload.values())
        given = [demand for demand in workload if demand.gpus]
        self.kinds = list(dict.fromkeys(kind_of(demand) for demand in given))
        number = {kind: place for place, kind in enumerate(self.kinds)}
        shapes = sorted(given, key=lambda demand: number[kind_of(demand)])
        self.shape_cpus: Ints = np.array([demand.cpus_milli for demand in shapes], np.int64)
        self.shape_memory: Ints = np.array([demand.memory_bytes for demand in shapes], np.int64)
        self.weights: Floats = np.array([float(workload[demand]) for demand in shapes])
        of_kind = np.array([number[kind_of(demand)] for demand in shapes], np.int64)
        self.begins: Ints = np.searchsorted(
            of_kind, np.arange(len(self.kinds))
        )  # the first shape of each kind
        self.needs: Floats = np.array([float(kind.gpus * kind.milli) for kind in self.kinds])
        self.parts = self._parts()

    def _parts(self) -> Floats:
        """Return by model and free thousandths what a GPU adds to each kind's reach. The last model is no GPU."""
        names = self.fleet.model_names
        parts = np.zeros((len(names) + 1, WHOLE_GPU + 1, len(self.kinds)))
        free = np.arange(WHOLE_GPU + 1)
        for column, kind in enumerate(self.kinds):
            for model, name in enumerate(names):
                if kind.models is None or name in kind.models:
                    parts[model, :, column] = np.where(free >= kind.milli, free, 0)
        return parts

    def reach(self, nodes: Ints) -> Floats:
        """Return the reach, node by kind."""
        found: Floats = self.parts[self.fleet.models[nodes], self.fleet.gpus[nodes]].sum(axis=1)
        return found

    def runnable(self, cpus: Ints, memory: Ints) -> Floats:
        """Return, node by kind, the weight of the tasks for which CPU and memory suffice.

        It uses sums and not a matrix product, for which the threads of a BLAS library cost more than they gain.
        """
        if not self.kinds:
            return np.zeros((len(cpus), 0))
        enough = (cpus[:, None] >= self.shape_cpus) & (memory[:, None] >= self.shape_memory)
        found: Floats = np.add.reduceat(np.where(enough, self.weights, 0.0), self.begins, axis=1)
        return found

    def usable(self, reach: Floats, runnable: Floats) -> Floats:
        """Return the usable GPU thousandths times task weight; `reach` may hold several cases of each node."""
        within = np.where(reach >= self.needs, reach, 0.0)
        found: Floats = np.einsum("...k,...k->...", within, runnable)
        return found

    def fragmented_gpus(self) -> float:
        """Return the GPUs of the fleet that a task drawn from the workload cannot use, on average."""
        nodes = np.arange(len(self.fleet.nodes))
        usable = self.usable(self.reach(nodes), self.runnable(self.fleet.cpus, self.fleet.memory))
        return (float(self.fleet.gpus.sum()) - float(usable.sum()) / max(self.total_weight, 1)) / WHOLE_GPU

    def dead_gpus(self) -> float:
        """Return the GPUs that no task of the workload can use."""
        fleet = self.fleet
        nodes = np.arange(len(fleet.nodes))
        can_run = (self.runnable(fleet.cpus, fleet.memory) > 0) & (self.reach(nodes) >= self.needs)
        by_gpu = self.parts[fleet.models, fleet.gpus] > 0
        used = (by_gpu & can_run[:, None, :]).any(axis=2)
        return float(fleet.gpus[~used].sum()) / WHOLE_GPU


def kind_of(demand: Demand) -> DemandKind:
    return DemandKind(demand.gpus, demand.gpu_milli, demand.gpu_models)
