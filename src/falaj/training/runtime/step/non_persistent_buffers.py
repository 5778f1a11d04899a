"""Buffers that are not in the model's state_dict (`persistent=False`, or the loss's), as far as training changes them.

Most are made by the code, such as masks and tables of angles, and must go on being so: a checkpoint has none of them.
One that steps have changed, such as a running mean, is state like any other, and a resumed run needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

LOSS = "@loss."


class NonPersistentBuffers:
    """The buffers of `model` that are not persistent, and those of `loss`, from the moment when this is made."""

    def __init__(self, model: nn.Module, loss: object) -> None:
        self._model, self._loss = model, loss
        every = local_buffers(model, loss)
        self._made_as = {name: (weakref.ref(buffer), buffer._version) for name, buffer in every}

    def changed(self) -> dict[str, Tensor]:
        """Those that are not as they were, changed in place or replaced, by name."""
        changed = [(n, b) for n, b in local_buffers(self._model, self._loss) if not self._is_as_made(n, b)]
        return {name: buffer.detach() for name, buffer in changed}

    def _is_as_made(self, name: str, buffer: Tensor) -> bool:
        place, version = self._made_as.get(name, (None, 0))
        return place is not None and place() is buffer and buffer._version == version


def local_buffers(model: nn.Module, loss: object) -> Iterator[tuple[str, Tensor]]:
    """These buffers by name, without those that lie on other processes."""
    for name, module, own in _places(model, loss):
        buffer = module._buffers[own]
        if buffer is not None and not buffer.is_meta:
            yield name, buffer


def buffers_to_restore(
    model: nn.Module, loss: object, saved: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor | None]:
    """What to read of the buffers that were `saved`, of these shapes: as the model has them, or whole ones."""
    found: dict[str, Tensor | None] = {}
    for name, module, own in _places(model, loss):
        buffer = module._buffers[own]
        if name in saved and not (buffer is not None and buffer.is_meta):
            is_alike = buffer is not None and tuple(buffer.shape) == saved[name]
            found[name] = buffer if is_alike else None
    return found


def restore_buffers(
    model: nn.Module, loss: object, pieces: Mapping[str, Tensor], device: torch.device
) -> None:
    """Put what was read in its place; one that steps had replaced by another shape is replaced again."""
    for name, module, own in _places(model, loss):
        if name not in pieces:
            continue
        piece, buffer = pieces[name], module._buffers[own]
        if buffer is not None and buffer.shape == piece.shape and buffer.dtype == piece.dtype:
            with torch.no_grad():
                buffer.copy_(piece)
        else:
            module._buffers[own] = piece.to(device if buffer is None else buffer.device)


def _places(model: nn.Module, loss: object) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, module in model.named_modules():
        for own in sorted(module._non_persistent_buffers_set & module._buffers.keys()):
            yield f"{prefix}.{own}" if prefix else own, module, own
    if isinstance(loss, nn.Module):
        for prefix, module in loss.named_modules():
            for own in sorted(module._buffers):
                yield LOSS + (f"{prefix}.{own}" if prefix else own), module, own
