"""Buffers outside the model's state_dict (`persistent=False`, or of the loss) that training changes.

Most are constants of the code, such as masks and position tables, and are not part of a checkpoint. A buffer that steps
have changed, such as a running mean, is state that a resumed run needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

LOSS = "@loss."


class NonPersistentBuffers:
    """Tracks the non-persistent buffers of `model` and the buffers of `loss` from its creation on."""

    def __init__(self, model: nn.Module, loss: object) -> None:
        self._model, self._loss = model, loss
        every = local_buffers(model, loss)
        self._made_as = {name: (weakref.ref(buffer), buffer._version) for name, buffer in every}

    def changed(self) -> dict[str, Tensor]:
        """Return the buffers that were changed in place or replaced, by name."""
        changed = [(n, b) for n, b in local_buffers(self._model, self._loss) if not self._is_as_made(n, b)]
        return {name: buffer.detach() for name, buffer in changed}

    def _is_as_made(self, name: str, buffer: Tensor) -> bool:
        place, version = self._made_as.get(name, (None, 0))
        return place is not None and place() is buffer and buffer._version == version


def local_buffers(model: nn.Module, loss: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that this process holds, by name."""
    for name, module, own in _places(model, loss):
        buffer = module._buffers[own]
        if buffer is not None and not buffer.is_meta:
            yield name, buffer


def buffers_to_restore(
    model: nn.Module, loss: object, saved: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor | None]:
    """Return what to read of the `saved` buffers: with the layout of the model's buffer, or whole."""
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
    """Load the buffers that were read; one whose shape had changed is replaced."""
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
