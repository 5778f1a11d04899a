"""Synchronizes buffers, such as running means, from the first process after steps that changed or replaced them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.parallel.tree_reduction import by_dtype

BufferVersions = list[tuple[Tensor, int]]
"""Buffers of one module, each with its version counter."""


class BufferSync:
    """Synchronizes the buffers that `model` holds after each step, by name: `forward` may replace them."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, control_group: dist.ProcessGroup) -> None:
        self._holders = {name: module for name, module in model.named_modules() if holds_buffers(module)}
        self._group, self._control_group = group, control_group
        self._seen: list[BufferVersions] = [buffer_versions(module) for module in self._holders.values()]
        self._form = self._form_now()

    def share(self) -> None:
        """Broadcast changed buffers. Collective: all processes call this after the passes of a step."""
        if not self._holders:
            return
        changed = self._agree()
        modules = [m for m, is_new in zip(self._holders.values(), changed, strict=True) if is_new]
        new = [buffer.detach() for module in modules for buffer, _ in buffer_versions(module)]
        first = dist.get_global_rank(self._group, 0)
        for together in by_dtype(new):
            flat = torch.cat([buffer.reshape(-1) for buffer in together])
            dist.broadcast(flat, first, group=self._group)
            for buffer, piece in zip(together, torch.split(flat, [b.numel() for b in together]), strict=True):
                buffer.copy_(piece.view(buffer.shape))
        self._seen = [buffer_versions(module) for module in self._holders.values()]

    def _agree(self) -> list[bool]:
        """Return for each module whether any process changed a buffer. Raise InvalidTraining if shapes differ."""
        now = [buffer_versions(module) for module in self._holders.values()]
        if any(map(is_replaced, now, self._seen)):
            self._form = self._form_now()
        changed = [is_changed(new, old) for new, old in zip(now, self._seen, strict=True)]
        flags = torch.tensor([*changed, self._form, -self._form])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._control_group)
        *answers, largest, smallest = flags.tolist()
        if largest != -smallest:
            raise buffer_mismatch(
                [f"{name}.{own}" for name, m in self._holders.items() for own in m._buffers]
            )
        return [bool(each) for each in answers]

    def _form_now(self) -> int:
        """Return a checksum of the names, shapes and dtypes of all buffers."""
        form = [
            (name, own, tuple(buffer.shape), str(buffer.dtype))
            for name, module in self._holders.items()
            for own, buffer in module._buffers.items()
            if buffer is not None
        ]
        return zlib.crc32(repr(form).encode())


class StaticBufferCheck:
    """Rejects steps that change buffers in exact runs: their values would depend on the distribution of samples.

    The first step may change them, because some models create tables then.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, tuple[Tensor, int]] | None = None

    def require(self) -> None:
        now = {name: (buffer, buffer._version) for name, buffer in self._model.named_buffers()}
        before, self._before = self._before, now
        if before is None:
            return
        moved = [name for name, seen_now in now.items() if not is_same(seen_now, before.get(name))]
        if moved:
            allowed = "buffers that steps do not change, or exact=False"
            faults = [TrainingFault(name, "a buffer that forward changes", allowed) for name in moved]
            raise InvalidTraining("this cannot be trained exactly", faults=faults)


def is_same(now: tuple[Tensor, int], before: tuple[Tensor, int] | None) -> bool:
    return before is not None and before[0] is now[0] and before[1] == now[1]


def holds_buffers(module: nn.Module) -> bool:
    """Return whether a module has buffers in this process; those of other pipeline stages are meta tensors."""
    return any(buffer is None or not buffer.is_meta for buffer in module._buffers.values())


def buffer_versions(module: nn.Module) -> BufferVersions:
    return [(b, b._version) for b in module._buffers.values() if b is not None and not b.is_meta]


def is_replaced(now: BufferVersions, before: BufferVersions) -> bool:
    return len(now) != len(before) or any(a is not b for (a, _), (b, _) in zip(now, before, strict=True))


def is_changed(now: BufferVersions, before: BufferVersions) -> bool:
    """Return whether any buffer of a module changed; a batch norm counts versions in only one of its three."""
    return is_replaced(now, before) or any(a != b for (_, a), (_, b) in zip(now, before, strict=True))


def buffer_mismatch(names: Sequence[str]) -> InvalidTraining:
    """Return the error that all processes raise; none of them knows which buffer differs."""
    given = f"other shapes in other processes, among {', '.join(name.lstrip('.') for name in names)}"
    fault = TrainingFault("buffers", given, "the same in all", "a shape that does not depend on the samples")
    return InvalidTraining("forward created buffers that cannot be synchronized", faults=[fault])
