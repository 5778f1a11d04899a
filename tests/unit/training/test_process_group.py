"""A process finds its rank, or is refused before it waits for other processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import falaj as fj
from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.parallel import process_group
from falaj.training.runtime.parallel.process_group import join_process_group
from falaj.training.runtime.planning import nvml


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One of two torchrun processes with one GPU, where forming a group or starting CUDA fails the test."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the processes talk, or CUDA is started")

    place = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**place, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(process_group, "gpu_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    return monkeypatch


@pytest.mark.parametrize("device", ["cuda", "auto"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_more_processes_than_gpus_are_refused_by_each_of_them(
    machine: pytest.MonkeyPatch, device: str, rank: str
) -> None:
    machine.setenv("LOCAL_RANK", rank)
    machine.setenv("RANK", rank)
    model, data = torch.nn.Linear(2, 1), (torch.zeros(4, 2), torch.zeros(4, 1))

    with pytest.raises(InvalidTraining) as refused:
        fj.fit(model, torch.nn.functional.mse_loss, data, steps=1, batch_size=2, device=device)

    assert str(refused.value).splitlines() == [
        "there are more processes than GPUs",
        "processes of this machine",
        "  given    2 processes, 1 GPU here",
        "  allowed  one GPU per process, visible to all of them",
        '  fix      torchrun --nproc-per-node=1, or device="cpu"',
    ]


def test_gpus_that_are_hidden_do_not_count(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("CUDA_VISIBLE_DEVICES", "3")

    with pytest.raises(InvalidTraining, match=r"2 processes, 1 GPU here \(CUDA_VISIBLE_DEVICES=3\)"):
        join_process_group(torch.device("cuda:0"))


def test_without_local_world_size_the_device_index_counts(machine: pytest.MonkeyPatch) -> None:
    machine.delenv("LOCAL_WORLD_SIZE")

    with pytest.raises(InvalidTraining, match="2 processes, 1 GPU here"):
        join_process_group(torch.device("cuda:1"))


@pytest.mark.parametrize("count", [2, 8])
def test_one_gpu_for_each_process_suffices(machine: pytest.MonkeyPatch, count: int) -> None:
    machine.setattr(process_group, "gpu_count", lambda: count)
    machine.setattr(torch.cuda, "set_device", lambda _: None)

    with pytest.raises(AssertionError, match="the processes talk"):
        join_process_group(torch.device("cuda:1"))


def test_counting_gpus_does_not_start_cuda(machine: pytest.MonkeyPatch) -> None:
    assert nvml.gpu_count() >= 0
    assert not torch.cuda.is_initialized()
