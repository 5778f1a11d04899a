"""Point-to-point communication between pipeline stages: activations forward, gradients backward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from falaj.training.runtime.parallel.pipeline.serialization import assemble, describe, empty_tensors

METADATA, VALUES, GRADIENTS = 101, 102, 103
"""Message tags: messages with one tag arrive in order, independent of others."""

Sending = tuple[dist.Work | None, Tensor]
"""A send in progress, and the tensor that it reads from."""


class ReceivedActivations(NamedTuple):
    """What the previous stage sent: the values, the tensors in them, and the state of its random generators."""

    values: list[Any]
    tensors: list[Tensor]
    rng_state: bytes


class SentActivations(NamedTuple):
    """What was sent to the next stage: the tensors that need gradients, and the sends in progress."""

    tensors: list[Tensor]
    messages: list[Sending]


class StageChannel:
    """The adjacent stages of one process. Sends are asynchronous."""

    def __init__(self, *, before: int | None, after: int | None, device: torch.device) -> None:
        self.before, self.after, self._device = before, after, device
        self._control_group: dist.ProcessGroup | None = None
        self._back: dist.ProcessGroup | None = None
        if device.type != "cpu":  # NCCL has no tags, and both directions would block each other
            self._control_group, self._back = dist.new_group(backend="gloo"), dist.new_group()

    def send(self, values: Sequence[Any], rng_state: bytes) -> SentActivations:
        """Send `values` to the next stage."""
        tensors: list[Tensor] = []
        words = json.dumps(describe(list(values), tensors)).encode()
        message = torch.frombuffer(bytearray(words + rng_state), dtype=torch.uint8)
        messages = [
            self._send(torch.tensor([len(words), len(rng_state)]), self.after, METADATA, self._control_group),
            self._send(message, self.after, METADATA, self._control_group),
        ]
        messages += [self._send(t.detach().contiguous(), self.after, VALUES, None) for t in tensors]
        return SentActivations([tensor for tensor in tensors if tensor.requires_grad], messages)

    def receive(self) -> ReceivedActivations:
        """Return what the previous stage sends."""
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.recv(sizes, self.before, group=self._control_group, tag=METADATA)
        length, more = (int(each) for each in sizes.tolist())
        text = bytearray(length + more)
        dist.recv(
            torch.frombuffer(text, dtype=torch.uint8), self.before, group=self._control_group, tag=METADATA
        )
        described = json.loads(text[:length])
        tensors = empty_tensors(described, self._device)
        for tensor in tensors:
            dist.recv(tensor.detach(), self.before, tag=VALUES)
        return ReceivedActivations(
            assemble(described, iter(tensors), self._device), tensors, bytes(text[length:])
        )

    def send_back(self, received: ReceivedActivations) -> list[Sending]:
        """Send the gradients of received activations to the previous stage."""
        gradients = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in received.tensors
            if tensor.requires_grad
        ]
        return [self._send(g.contiguous(), self.before, GRADIENTS, self._back) for g in gradients]

    def receive_back(self, sent: SentActivations) -> list[Tensor]:
        """Return the gradients of sent activations."""
        found = [torch.empty_like(t, memory_format=torch.contiguous_format).detach() for t in sent.tensors]
        for gradient in found:
            dist.recv(gradient, self.after, group=self._back, tag=GRADIENTS)
        wait_all(sent.messages)
        return found

    def _send(self, tensor: Tensor, to: int | None, tag: int, group: dist.ProcessGroup | None) -> Sending:
        return dist.isend(tensor, to, group=group, tag=tag), tensor


def wait_all(messages: Sequence[Sending]) -> None:
    """Wait for all sends, so that their memory can be reused."""
    for work, _ in messages:
        if work is not None:
            work.wait()
