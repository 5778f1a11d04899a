"""How much of what is free a workload can use: GPUs that a task drawn from it would find out of its reach.

A task can use, on a node that can start it, the free part of every GPU that holds its share; nothing on another node.
The rest is a fragment to that task, and the mean over the workload's tasks is the node's fragmentation (as the paper
that came with the openb trace defines it). Tasks without GPUs use no GPU anywhere: to them all is a fragment.

All figures are whole numbers below 2**53, held as floats for fast products: sums are exact in any order, so equal
states compare equal on every machine.
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
    """What a task asks of GPUs alone; many shapes of CPU and memory share one kind."""

    gpus: int
    milli: int
    models: frozenset[str] | None


class FragmentationMeasure:
    """The fragmentation of a fleet as seen by a workload: demands, each with its weight.

    The free parts of a node's GPUs that hold a kind's share add up to its `reach`; the kind fits when that is at least
    all it asks for. So a node's state boils down to one number a kind, to which each GPU adds its own part.
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
        """By model and free thousandths: what such a GPU adds to the reach of each kind. The last model is no GPU."""
        names = self.fleet.model_names
        parts = np.zeros((len(names) + 1, WHOLE_GPU + 1, len(self.kinds)))
        free = np.arange(WHOLE_GPU + 1)
        for column, kind in enumerate(self.kinds):
            for model, name in enumerate(names):
                if kind.models is None or name in kind.models:
                    parts[model, :, column] = np.where(free >= kind.milli, free, 0)
        return parts

    def reach(self, nodes: Ints) -> Floats:
        """Node by kind."""
        found: Floats = self.parts[self.fleet.models[nodes], self.fleet.gpus[nodes]].sum(axis=1)
        return found

    def runnable(self, cpus: Ints, memory: Ints) -> Floats:
        """Node by kind: the weight of the tasks that would find CPU and memory enough in what is given.

        Sums and no product of matrices: for that the threads of a linear algebra library cost more than they give.
        """
        if not self.kinds:
            return np.zeros((len(cpus), 0))
        enough = (cpus[:, None] >= self.shape_cpus) & (memory[:, None] >= self.shape_memory)
        found: Floats = np.add.reduceat(np.where(enough, self.weights, 0.0), self.begins, axis=1)
        return found

    def usable(self, reach: Floats, runnable: Floats) -> Floats:
        """GPU thousandths that the tasks could use, times their weight; `reach` may hold several cases of each node."""
        within = np.where(reach >= self.needs, reach, 0.0)
        found: Floats = np.einsum("...k,...k->...", within, runnable)
        return found

    def fragmented_gpus(self) -> float:
        """The GPUs that a task drawn from the workload cannot use, on average, in the whole fleet."""
        nodes = np.arange(len(self.fleet.nodes))
        usable = self.usable(self.reach(nodes), self.runnable(self.fleet.cpus, self.fleet.memory))
        return (float(self.fleet.gpus.sum()) - float(usable.sum()) / max(self.total_weight, 1)) / WHOLE_GPU

    def dead_gpus(self) -> float:
        """The GPUs that not one task of the workload can use."""
        fleet = self.fleet
        nodes = np.arange(len(fleet.nodes))
        can_run = (self.runnable(fleet.cpus, fleet.memory) > 0) & (self.reach(nodes) >= self.needs)
        by_gpu = self.parts[fleet.models, fleet.gpus] > 0
        used = (by_gpu & can_run[:, None, :]).any(axis=2)
        return float(fleet.gpus[~used].sum()) / WHOLE_GPU


def kind_of(demand: Demand) -> DemandKind:
    return DemandKind(demand.gpus, demand.gpu_milli, demand.gpu_models)
