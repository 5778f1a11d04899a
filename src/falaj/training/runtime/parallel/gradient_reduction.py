"""Sums the gradients of model replicas, also if each uses other parameters.

torch's DDP hangs or skips gradients if a parameter that it expects gets none. Here every process reduces every
bucket once per step, in the same order: as soon as the bucket is complete in the last backward pass, or after
it. A parameter that no process used has no gradient afterwards, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from falaj.training.runtime.parallel.dtensors import local_tensor

BUCKET_BYTES = 25 << 20


class GradientReducer:
    """Sums the gradients of `parameters` over `group`. `control_group` are the same processes over gloo on CPUs."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, control_group: dist.ProcessGroup
    ) -> None:
        self._frozen, self._group, self._control_group = list(parameters), group, control_group
        self._parameters: list[nn.Parameter] = []
        self._buckets: list[list[nn.Parameter]] = []
        self._sizes: list[list[int]] = []
        self._bucket_of: dict[int, int] = {}
        self._listens = False
        self._unheard: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []
        self._in_flight: list[tuple[dist.Work, Tensor]] = []
        self._missing: list[int] = []
        self._late = False
        self._take_thawed()
        self._start_over()

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Wrap the last backward pass: complete buckets are reduced at once."""
        for parameter in self._unheard:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._has_gradient))  # type: ignore[no-untyped-call]
        self._unheard = []
        self._listens = True
        try:
            yield
        finally:
            self._listens = False

    def remove_hooks(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def discard_step(self) -> None:
        """Prepare to compute the step again. Reductions in flight cannot be cancelled: all are repeated at the
        end."""
        self._late = self._late or bool(self._in_flight)
        self._missing = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Complete the reduction; afterwards the gradients are those of all processes."""
        self._take_thawed()
        while len(self._in_flight) < len(self._buckets):
            self._launch()
        used, late = self._agree()
        if late:
            self._in_flight = [self._add(bucket) for bucket in self._buckets]
        for bucket, sizes, (work, flat) in zip(self._buckets, self._sizes, self._in_flight, strict=True):
            work.wait()
            pieces = zip(bucket, torch.split(flat, sizes), strict=True)
            put_gradients([(parameter, piece) for parameter, piece in pieces if id(parameter) in used])
        self._start_over()

    def _take_thawed(self) -> None:
        """Add buckets for parameters that are no longer frozen; all processes unfreeze them before the same step."""
        thawed = [parameter for parameter in self._frozen if parameter.requires_grad]
        if not thawed:
            return
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        self._parameters += thawed
        for bucket in make_buckets(thawed[::-1]):  # about the order of a backward pass
            self._bucket_of |= {id(parameter): len(self._buckets) for parameter in bucket}
            self._buckets.append(bucket)
            self._sizes.append([local_tensor(parameter.detach()).numel() for parameter in bucket])
            self._missing.append(len(bucket))
        self._unheard += thawed

    def _start_over(self) -> None:
        self._in_flight = []
        self._missing = [len(bucket) for bucket in self._buckets]
        self._late = False

    def _has_gradient(self, parameter: Tensor) -> None:
        if not self._listens:
            return
        number = self._bucket_of[id(parameter)]
        if number < len(self._in_flight):  # another gradient after the bucket was sent
            self._late = True
            return
        self._missing[number] -= 1
        while len(self._in_flight) < len(self._buckets) and self._missing[len(self._in_flight)] <= 0:
            self._launch()

    def _launch(self) -> None:
        self._in_flight.append(self._add(self._buckets[len(self._in_flight)]))

    def _add(self, bucket: Sequence[nn.Parameter]) -> tuple[dist.Work, Tensor]:
        flat = torch.cat([local_gradient(parameter).reshape(-1) for parameter in bucket])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        return work, flat

    def _agree(self) -> tuple[set[int], bool]:
        """Return the parameters with a gradient in any process, and whether the reductions must be repeated."""
        flags = [p.grad is not None for p in self._parameters] + [self._late]
        *used, late = any_rank(flags, self._control_group)
        return {id(p) for p, is_used in zip(self._parameters, used, strict=True) if is_used}, late


def cpu_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """Return the processes along `axis` as a gloo group, whose messages do not wait for GPU work."""
    if mesh.device_type == "cpu":
        return mesh[axis].get_group()
    names = mesh.mesh_dim_names or ()
    lines = mesh.mesh.movedim(names.index(axis), -1)
    ranks = lines.reshape(-1, lines.shape[-1]).tolist()
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(ranks, backend="gloo")  # type: ignore[no-untyped-call]
    return group


def any_rank(flags: Sequence[bool], control_group: dist.ProcessGroup) -> list[bool]:
    """Return for each flag whether any process sets it."""
    answers = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(answers, dist.ReduceOp.MAX, group=control_group)
    return [bool(each) for each in answers.tolist()]


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters of one dtype each, in order, in buckets of about `BUCKET_BYTES`."""
    found: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        own = local_tensor(parameter.detach())
        if not found or found[-1][0].dtype != own.dtype or size + own.nbytes > BUCKET_BYTES:
            found.append([])
            size = 0
        found[-1].append(parameter)
        size += own.nbytes
    return found


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of this process; zeros if there is none."""
    if parameter.grad is None:
        return torch.zeros_like(local_tensor(parameter.detach()))
    own = local_tensor(parameter.grad)
    return own.to_dense() if own.is_sparse else own


def put_gradients(given: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Write the flat sums back to the gradients, all at once, which is much faster."""
    places = [gradient_buffer(parameter) for parameter, _ in given]
    sums = [piece.view(place.shape) for place, (_, piece) in zip(places, given, strict=True)]
    if places:
        torch._foreach_copy_(places, sums)


def gradient_buffer(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = torch.zeros_like(parameter)
    return local_tensor(parameter.grad)
