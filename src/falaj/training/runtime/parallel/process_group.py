"""The processes that train one model together: rank, size, device and collective decisions."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.planning.nvml import gpu_count, is_cuda_available

GroupRequest = Literal["stop", "end", "save", "halve"]
"""stop: pause until the next call; end: finish the run; save: checkpoint; halve: use more micro-batches."""
GROUP_REQUESTS: tuple[GroupRequest, ...] = get_args(GroupRequest)


@dataclass
class ProcessGroup:
    """Process `rank` of `size`. A request of one process is carried out by all of them after the same step."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    requests: set[GroupRequest] = field(default_factory=set)
    _agreed: set[GroupRequest] = field(default_factory=set)
    _pending: Tensor | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which reports for all."""
        return self.rank == 0

    def sum_loss(self, loss: Tensor) -> Tensor:
        """Return the sum of the losses of all processes; requests are exchanged in the same collective."""
        if self.size == 1:
            return loss
        summed = loss.new_zeros(
            1 + len(GROUP_REQUESTS)
        )  # created on the device: a copy from the host would synchronize
        summed[0] = loss
        for place, request in enumerate(GROUP_REQUESTS, 1):
            if request in self.requests:
                summed[place] = 1
        dist.all_reduce(summed)
        self._pending = summed[1:]
        return summed[0]

    def agree_on_requests(self) -> None:
        """Apply the requests of the last `sum_loss`. All processes must call this after the same steps."""
        if self._pending is not None:
            self._agreed |= {
                request
                for request, count in zip(GROUP_REQUESTS, self._pending.tolist(), strict=True)
                if count
            }
            self._pending = None

    def is_agreed(self, request: GroupRequest) -> bool:
        """Return whether a request is due in all processes."""
        return request in (self.requests if self.size == 1 else self._agreed)

    def clear_request(self, request: GroupRequest) -> None:
        self.requests.discard(request)
        self._agreed.discard(request)

    def broadcast_flag(self, value: bool) -> bool:
        """Return the flag of rank 0 in all processes."""
        if self.size == 1:
            return value
        said = torch.tensor([value], dtype=torch.uint8, device=self.device)
        dist.broadcast(said, 0)
        return bool(said.item())

    def maximum(self, value: int) -> int:
        """Return the maximum over all processes."""
        if self.size == 1:
            return value
        given = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(given, dist.ReduceOp.MAX)
        return int(given.item())

    def any(self, value: bool) -> bool:
        """Return whether the flag is set in any process."""
        if self.size == 1:
            return value
        said = torch.tensor([value], dtype=torch.uint8, device=self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        return bool(said.item())

    def broadcast_number(self, value: float) -> float:
        """Return the number of rank 0 in all processes."""
        if self.size == 1:
            return value
        said = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(said, 0)
        return float(said.item())

    def broadcast_bytes(self, given: bytearray | None) -> bytearray | None:
        """Return the bytes of rank 0 in all processes; None if it has none."""
        if self.size == 1:
            return given
        length = torch.tensor([-1 if given is None else len(given)], device=self.device)
        dist.broadcast(length, 0)
        count = int(length.item())
        if count < 0:
            return None
        data = bytearray(count) if given is None else given
        if count:
            bytes_ = torch.frombuffer(data, dtype=torch.uint8).to(self.device)
            dist.broadcast(bytes_, 0)
            if not self.is_leader:
                torch.frombuffer(data, dtype=torch.uint8).copy_(bytes_)
        return data


def find_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is the GPU if there is one. CUDA is not started: a search may fork."""
    if name == "auto" and not is_cuda_available():
        return torch.device("cpu")
    if name in ("auto", "cuda") and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    name = "cuda" if name == "auto" else name
    try:
        device = torch.device(name)
        if device.type != "cuda" or not is_cuda_available():
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        fault = TrainingFault(
            "device", f"{name} ({reason})", "auto, cpu, or a device of this machine", 'device="auto"'
        )
        raise InvalidTraining("the device does not exist on this machine", faults=[fault]) from error
    return device


def join_process_group(device: torch.device) -> ProcessGroup:
    """Return the process group of torchrun's environment variables; this process alone without them."""
    if not dist.is_initialized():
        size = os.environ.get("WORLD_SIZE", "1")
        if size == "1":
            return ProcessGroup(device=device)
        if faults := list(rank_faults(size)):
            raise InvalidTraining(
                f"WORLD_SIZE is {size}, but the rank of this process is unknown", faults=faults
            )
        if device.type == "cuda":
            require_gpus(device)
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(leave_process_group)
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), device)


def rank_faults(size: str) -> Iterator[TrainingFault]:
    """Yield the faults of torchrun's variables, before other processes wait for this one."""
    fix = f"torchrun --nproc-per-node={size if size.isdecimal() and int(size) else 2}"
    if not (size.isdecimal() and int(size)):
        yield TrainingFault("WORLD_SIZE", size, "the number of processes", fix)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        yield TrainingFault(", ".join(missing), "not set", "torchrun's variables", fix)
    rank = os.environ.get("RANK", "0")
    if not rank.isdecimal() or (size.isdecimal() and int(rank) >= int(size)):
        yield TrainingFault("RANK", rank, f"a number below WORLD_SIZE, {size}", fix)


def require_gpus(device: torch.device) -> None:
    """Raise InvalidTraining in every process of this machine if there are more processes than GPUs."""
    gpus, named = gpu_count(), os.environ.get("LOCAL_WORLD_SIZE", "")
    processes = int(named) if named.isdecimal() else (device.index or 0) + 1
    if processes <= gpus:
        return
    given = f"{processes} processes, {gpus} GPU{'' if gpus == 1 else 's'} here"
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    given += f" (CUDA_VISIBLE_DEVICES={seen})" if seen is not None else ""
    fix = f'torchrun --nproc-per-node={gpus}, or device="cpu"'
    fault = TrainingFault(
        "processes of this machine", given, "one GPU per process, visible to all of them", fix
    )
    raise InvalidTraining("there are more processes than GPUs", faults=[fault])


def leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
