"""The cost of a step: floating-point operations and bytes, counted on fake tensors.

The model is copied with fake tensors in place of its own, so that the run is not affected: no weight, no random
number, no cached tensor. Counting runs after real steps, when caches outside of the model are filled. If
counting fails, there is no cost, and the run continues.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from falaj.training.runtime.data.sources import Batch, map_tensors
from falaj.training.runtime.planning.cache import load_entry, plan_key, store_entry
from falaj.training.runtime.step.calling import BatchCall, Loss

FORMAT = 1


@dataclass(frozen=True)
class StepCost:
    """Floating-point operations of a step; and bytes to and from memory, as if each operation ran alone."""

    flops: float
    bytes: float


class CostCounter:
    """A copy of a model and its loss without values. Made before the model is parallelized, which changes it."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        """Copy the model. Exceptions of the copy are passed on."""
        stand_ins: dict[int, Any] = {
            id(tensor): torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
            for tensor in (*model.parameters(), *model.buffers())
        }
        # deepcopy takes these where it finds the originals, also where one is used twice.
        self._model, self._loss = copy.deepcopy((model, loss), stand_ins)
        self._device = next(iter(model.parameters())).device

    def count(self, sample: Batch, *, samples: int) -> StepCost:
        """Run both passes over `samples` samples like `sample`. Exceptions of the model are passed on."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils.flop_counter import FlopCounterMode

        traffic, flops = MemoryTraffic(), FlopCounterMode(display=False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            self._take_shapes()
            batch = map_tensors(sample, lambda each: self._shape((samples, *each.shape[1:]), each))
            call = BatchCall(self._model, self._loss)
            with traffic, flops:
                call(self._model.train(), batch).backward()  # type: ignore[no-untyped-call]
        return StepCost(float(flops.get_total_flops()), float(traffic.bytes))

    def _take_shapes(self) -> None:
        """Replace meta tensors by fake tensors on the device; shared tensors stay shared."""
        made: dict[int, Tensor] = {}
        for part in self._model.modules():
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor.device.type == "meta":
                        new = made.get(id(tensor))
                        if new is None:
                            new = self._shape(tensor.shape, tensor).requires_grad_(tensor.requires_grad)
                        held[name] = made[id(tensor)] = new  # type: ignore[assignment]

    def _shape(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return torch.empty(tuple(shape), dtype=like.dtype, device=self._device)


def load_cost(model: nn.Module, sample: Batch, *, samples: int) -> StepCost | None:
    """Return the cost that was counted before for a model of this structure, or None."""
    try:
        key = cost_key(model, sample, samples)
    except StopIteration:  # a model without parameters
        return None
    return load_entry(
        "costs", key, lambda found: StepCost(float(found["flops"]), float(found["bytes"])), version=FORMAT
    )


def update_bytes(optimizer: optim.Optimizer) -> float:
    """Return the bytes that an update reads and writes: parameters and state both ways, gradients once."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = [v for v in optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor)]
            total += 2 * sum(tensor.nbytes for tensor in [parameter, *held]) + parameter.nbytes
    return float(total)


class MemoryTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that operations read and write; views count nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not is_view(func):
            self.bytes += sum(
                leaf.numel() * leaf.element_size()
                for leaf in tree_leaves((args, kwargs, out))
                if isinstance(leaf, Tensor)
            )
        return out


def is_view(func: Any) -> bool:
    """Return whether an operation returns a view and writes nothing."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def cost_key(model: nn.Module, sample: Batch, samples: int) -> str | None:
    first = next(iter(model.parameters()))
    return plan_key(model, sample, first.device, {"samples": samples, "counted": "cost"})


def store_cost(key: str | None, cost: StepCost) -> None:
    store_entry("costs", key, asdict(cost), version=FORMAT)
