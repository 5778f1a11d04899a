"""Adds the gradients of several copies of a model, whichever of its parameters each of them used.

torch's DDP waits for ever, or adds nothing, where a parameter gets no gradient that it expected. Here every process
adds every bucket once a step, in the same order: as soon as the bucket is complete in the last backward pass, or after
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
    """The sum over `group` of the gradients of `parameters`. `words` are the same processes, talking by their CPUs."""

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
        """Around the last backward pass: what is complete is added at once."""
        for parameter in self._unheard:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._has_gradient))  # type: ignore[no-untyped-call]
        self._unheard = []
        self._listens = True
        try:
            yield
        finally:
            self._listens = False

    def remove_hooks(self) -> None:
        """Listen no more: the parameters are as they were given."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def discard_step(self) -> None:
        """The step is computed again. What is under way cannot be called back: all add everything anew at the end."""
        self._late = self._late or bool(self._in_flight)
        self._missing = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """From here on, the gradients are those of all processes."""
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
        """Add buckets of what is not frozen any more, which all processes thaw before the same step."""
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
        if number < len(self._in_flight):  # it came again, after it was sent: what was sent is not all
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
        """The parameters that some process has a gradient for, and whether what was sent must be sent again."""
        said = [p.grad is not None for p in self._parameters] + [self._late]
        *used, late = any_rank(said, self._control_group)
        return {id(p) for p, is_used in zip(self._parameters, used, strict=True) if is_used}, late


def cpu_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """The processes along `axis`, talking by their CPUs: what they say must not wait for what a GPU has to do."""
    if mesh.device_type == "cpu":
        return mesh[axis].get_group()
    names = mesh.mesh_dim_names or ()
    lines = mesh.mesh.movedim(names.index(axis), -1)
    ranks = lines.reshape(-1, lines.shape[-1]).tolist()
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(ranks, backend="gloo")  # type: ignore[no-untyped-call]
    return group


def any_rank(said: Sequence[bool], control_group: dist.ProcessGroup) -> list[bool]:
    """For each question, whether some process says yes."""
    answers = torch.tensor(said, dtype=torch.uint8)
    dist.all_reduce(answers, dist.ReduceOp.MAX, group=control_group)
    return [bool(each) for each in answers.tolist()]


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one type, in order, about `BUCKET_BYTES` together."""
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
    """What this process has of the gradient; zeros if it has none."""
    if parameter.grad is None:
        return torch.zeros_like(local_tensor(parameter.detach()))
    own = local_tensor(parameter.grad)
    return own.to_dense() if own.is_sparse else own


def put_gradients(given: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Put each sum, which is flat, where the gradient of its parameter is; all at once, which is much quicker."""
    places = [gradient_buffer(parameter) for parameter, _ in given]
    sums = [piece.view(place.shape) for place, (_, piece) in zip(places, given, strict=True)]
    if places:
        torch._foreach_copy_(places, sums)


def gradient_buffer(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = torch.zeros_like(parameter)
    return local_tensor(parameter.grad)
