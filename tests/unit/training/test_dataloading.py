"""Prefetching by worker processes, a thread or a stream: equal results, and clear errors when workers die."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import dataloading_fit
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.dataloading import selection, start_method
from falaj.training.runtime.data.dataloading.loaders import InlineLoader, ThreadLoader
from falaj.training.runtime.data.dataloading.start_method import StartMethod, choose_start_method
from falaj.training.runtime.data.dataloading.worker_pool import WorkerPoolLoader
from falaj.training.runtime.data.sources import DatasetSource, TensorSource
from falaj.training.runtime.errors import InvalidTraining, RaggedBatch, SampleUnreadable, WorkerLost
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.step.micro_batches import MicroBatchReader
from polling import PATIENCE_S, eventually

FED = Path(dataloading_fit.__file__)
FORK = StartMethod("fork")
mse = nn.functional.mse_loss


class Noisy:
    """Samples with augmentation by torch, numpy and Python."""

    def __init__(self, count: int = 64) -> None:
        self._rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self._rows[index] + torch.randn(4) + random.random() + float(numpy.random.rand())
        return row, row.sum().reshape(1)


class Failing(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 17:
            raise ValueError("a torn page")
        return super().__getitem__(index)


class Deadly(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 17 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Greedy(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 17:
            torch.empty(1 << 55, dtype=torch.uint8)
        return super().__getitem__(index)


class Ragged(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        return (inputs[:3] if index == 17 else inputs), target


class NotPicklable(Noisy):
    """Returns a value that cannot be pickled."""

    def __getitem__(self, index: int) -> Any:
        class Local(str):
            pass

        return {"row": super().__getitem__(index)[0], "name": Local(index)}


class Together(Noisy):
    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return [self[index] for index in indices]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


def train(data: Any = None, **changes: Any) -> FitResult:
    options: dict[str, Any] = {"steps": 20, "batch_size": 8, "device": "cpu", "seed": 5, **changes}
    model, loss = options.pop("model", None), options.pop("loss", mse)
    return fit(model or make_model(), loss, Noisy() if data is None else data, **options)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    assert multiprocessing.active_children() == []


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers, even if the test process has threads."""
    monkeypatch.setattr(start_method, "reason_not_to_fork", lambda: None)


# -------------------------------------------------------------------------------------- equal results


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"epochs": 3, "steps": None, "batch_size": 10}])
def test_any_number_of_workers_gives_the_same_losses(options: dict[str, Any]) -> None:
    straight = train(workers=0, **options)

    for workers, prefetch in ((1, 1), (2, 3), (3, 1)):
        result = train(workers=workers, prefetch=prefetch, **options)
        assert result.losses == straight.losses
        assert result.ledger == straight.ledger
        assert result.plan.workers == workers


@pytest.mark.usefixtures("forks")
def test_random_numbers_of_the_model_do_not_depend_on_the_loader() -> None:
    def noisy_loss(out: Tensor, target: Tensor) -> Tensor:
        return mse(out, target) * (1 + random.random() + float(numpy.random.rand()) + torch.rand(1).item())

    assert train(loss=noisy_loss, workers=2).losses == train(loss=noisy_loss, workers=0).losses


@pytest.mark.usefixtures("forks")
def test_a_resumed_run_may_have_other_workers(tmp_path: Path) -> None:
    straight = train(workers=0)

    first = train(workers=2, steps=7, run=tmp_path)
    second = train(workers=1, steps=14, run=tmp_path)
    third = train(workers=0, run=tmp_path)

    assert (second.resumed_from, third.resumed_from) == (7, 14)
    assert first.losses + second.losses + third.losses == straight.losses


@pytest.mark.usefixtures("forks")
def test_samples_that_are_read_in_batches_are_so_in_workers_too() -> None:
    assert train(Together(), workers=2).losses == train(workers=0).losses


@pytest.mark.usefixtures("forks")
def test_micro_batches_reduced_by_out_of_memory_are_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    def trained(workers: int) -> FitResult:
        left = [4]

        def large(out: Tensor, target: Tensor) -> Tensor:
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("no room")
            return mse(out, target)

        return train(loss=large, workers=workers)

    assert trained(2).losses == trained(0).losses
    assert "continuing with 2 micro-batches" in capsys.readouterr().out


@pytest.mark.slow
def test_a_spawned_worker_gives_the_same_batches() -> None:
    source, batches = DatasetSource(Noisy()), BatchPlan(64, 8, seed=5)
    reader = MicroBatchReader(source, seed=5, count=2)
    expected = InlineLoader(reader).take(1, batches.indices(1))

    options: dict[str, Any] = {"last": 2, "count": 1, "prefetch": 1}
    with closing(
        WorkerPoolLoader(reader, source, batches, start_method=StartMethod("spawn"), **options)
    ) as workers:
        found = workers.take(1, batches.indices(1))

    assert [part.place for part in found] == [0, 1]
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.batch, theirs.batch, strict=True))


@pytest.mark.usefixtures("forks")
def test_steps_can_be_taken_in_any_order() -> None:
    with closing(workers_over(Noisy(), count=2)) as loader:
        batches = BatchPlan(64, 8, seed=5)
        inline = InlineLoader(MicroBatchReader(DatasetSource(Noisy()), seed=5, count=1))
        for step in (3, 4, 1, 1, 9, 2):
            (ours,), (theirs,) = (each.take(step, batches.indices(step)) for each in (loader, inline))
            assert torch.equal(ours.batch[0], theirs.batch[0])
        assert loader.reading_s > 0


def workers_over(dataset: Any, *, count: int, last: int = 100) -> WorkerPoolLoader:
    items = DatasetSource(dataset)
    reader, batches = MicroBatchReader(items, seed=5, count=1), BatchPlan(len(items), 8, seed=5)
    return WorkerPoolLoader(reader, items, batches, last=last, count=count, prefetch=2, start_method=FORK)


def test_a_reader_thread_gives_the_same_batches_in_any_order() -> None:
    rows = torch.randn(64, 4)
    source, batches = TensorSource((rows, rows), where="data", mapped=True), BatchPlan(64, 8, seed=5)
    reader = MicroBatchReader(source, seed=5, count=1)

    with closing(ThreadLoader(reader, batches, last=8, ahead=2)) as beside:
        for step in (1, 2, 3, 7, 8, 2):
            (part,) = beside.take(step, batches.indices(step))
            assert torch.equal(part.batch[0], rows[batches.indices(step)])
        assert beside.reading_s > 0


# ------------------------------------------------------------------------------------------- failures


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_named_with_its_step_and_traceback(workers: int) -> None:
    plan = BatchPlan(64, 8, seed=5)
    step = next(step for step in range(1, 9) if 17 in plan.indices(step))

    with pytest.raises(
        SampleUnreadable, match=f"sample 17 of step {step} cannot be read: ValueError: a torn page"
    ) as info:
        train(Failing(), workers=workers)

    shown = str(info.value.__cause__) if workers else repr(info.value.__cause__)
    assert "a torn page" in shown
    assert not workers or "in __getitem__" in shown


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("workers", [0, 2])
def test_out_of_memory_in_a_worker_is_reported_with_a_fix(workers: int) -> None:
    with pytest.raises(SampleUnreadable, match="sample 17 of step") as info:
        train(Greedy(), workers=workers)

    assert "fewer workers, a smaller prefetch, or a smaller batch_size" in str(info.value)


@pytest.mark.usefixtures("forks")
def test_samples_that_differ_are_the_same_error_in_a_worker() -> None:
    with pytest.raises(RaggedBatch, match="sample 17 is"):
        train(Ragged(), workers=2)


@pytest.mark.usefixtures("forks")
def test_a_batch_that_cannot_be_pickled_is_an_error() -> None:
    with (
        closing(workers_over(NotPicklable(), count=1)) as loader,
        pytest.raises(SampleUnreadable, match="cannot be sent to the trainer"),
    ):
        loader.take(1, BatchPlan(64, 8, seed=5).indices(1))


@pytest.mark.usefixtures("forks")
def test_a_worker_that_is_killed_at_a_sample_is_an_error_that_names_it(tmp_path: Path) -> None:
    plan = BatchPlan(64, 8, seed=5)
    step = next(step for step in range(1, 9) if 17 in plan.indices(step))

    with pytest.raises(WorkerLost, match=rf"was killed \(SIGKILL\) at sample 17 of step {step}") as info:
        train(Deadly(), workers=2, run=tmp_path, checkpoint_every=1)

    assert "fewer workers" in str(info.value)
    again = train(workers=0, run=tmp_path)
    assert 0 < again.resumed_from < step
    assert again.losses == train(workers=0).losses[again.resumed_from :]


@pytest.mark.usefixtures("forks")
def test_a_worker_that_is_killed_while_it_waits_is_noticed() -> None:
    loader, plan = workers_over(Noisy(), count=1, last=2), BatchPlan(64, 8, seed=5)
    with closing(loader):
        loader.take(2, plan.indices(2))
        (worker,) = multiprocessing.active_children()
        os.kill(worker.pid or 0, signal.SIGKILL)

        with pytest.raises(WorkerLost, match="before step 1"):
            loader.take(1, plan.indices(1))


@pytest.mark.parametrize(
    "options", [{"workers": -1}, {"workers": True}, {"prefetch": 0}, {"workers": "many"}], ids=str
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidTraining) as refusal:
        train(**options)

    assert [fault.where for fault in refusal.value.faults] == list(options)


# ----------------------------------------------------------------------------------- killed processes


def start(
    run: Path | str, workers: int, pids: Path, pause_s: float, **variables: str
) -> subprocess.Popen[str]:
    pids.mkdir(exist_ok=True)
    words = [sys.executable, str(FED), str(run), str(workers), str(pids), str(pause_s)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def ended(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return out.split()


def are_gone(pids: Path) -> bool:
    return not any(is_running(int(path.name)) for path in pids.iterdir())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
def test_no_worker_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path / "run", 2, tmp_path / "pids", 0.05)
    eventually(lambda: len(list((tmp_path / "pids").iterdir())) == 2)

    process.kill()
    process.communicate()

    eventually(lambda: are_gone(tmp_path / "pids"))


@pytest.mark.slow
def test_a_sigterm_to_all_processes_saves_the_run_which_resumes_exactly(tmp_path: Path) -> None:
    undisturbed = dataloading_fit.train("", 0, tmp_path, 0)
    process = start(tmp_path / "run", 2, tmp_path / "pids", 0.05)
    eventually(lambda: (tmp_path / "run" / "progress.json").exists())

    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE_S)

    assert (process.returncode, out) == (-signal.SIGTERM, "")
    assert are_gone(tmp_path / "pids")
    resumed, stopped, workers, loss = ended(start(tmp_path / "run", 1, tmp_path / "pids", 0))
    assert 0 < int(resumed) < 40
    assert (stopped, workers, loss) == ("done", "1", undisturbed.losses[-1].hex())


@pytest.mark.slow
def test_each_process_of_a_world_has_workers_of_its_own(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    alone = dataloading_fit.train("", 0, tmp_path, 0, accumulate=2)

    pids = tmp_path / "pids"
    pair = [start("", 1, pids, 0, **{**world, "RANK": str(rank)}) for rank in (0, 1)]
    (*_, first), (*_, second) = (ended(each) for each in pair)

    assert float.fromhex(first) == float.fromhex(second) == pytest.approx(alone.losses[-1], rel=1e-4)
    assert len(list(pids.iterdir())) == 2


# -------------------------------------------------------------------------------------- choice of workers


def beside_a_thread(act: Any) -> Any:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        return act()
    finally:
        done.set()
        thread.join()


def test_workers_are_spawned_instead_of_forked_when_threads_run() -> None:
    assert beside_a_thread(lambda: choose_start_method(DatasetSource(Noisy()))) == StartMethod(
        "spawn", "other threads are running"
    )


def test_a_dataset_that_cannot_be_pickled_is_read_without_workers_and_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    dataset = Noisy()
    dataset.hook = lambda: None  # type: ignore[attr-defined]

    result = beside_a_thread(lambda: train(dataset, workers=2))

    assert result.plan.workers == 0
    assert result.losses == train(workers=0).losses
    output = capsys.readouterr().out
    assert "without worker processes: other threads are running, and the dataset cannot be sent" in output


def test_a_script_without_a_main_guard_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "Noisy", Noisy, raising=False)
    monkeypatch.setattr(Noisy, "__module__", "__main__")

    script.write_text("fit(model, loss, Noisy())")
    refused = beside_a_thread(lambda: choose_start_method(DatasetSource(Noisy())))
    script.write_text('if __name__ == "__main__": fit(model, loss, Noisy())')
    accepted = beside_a_thread(lambda: choose_start_method(DatasetSource(Noisy())))

    assert refused.method is None
    assert 'if __name__ == "__main__"' in refused.why
    assert accepted == StartMethod("spawn", "other threads are running", needs_main=True)


def test_cores_are_divided_among_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    assert start_method.cores_per_rank() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert start_method.cores_per_rank() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "40")
    assert start_method.cores_per_rank() == 1


@pytest.mark.parametrize(("step_s", "last", "expected"), [(0.001, 10**6, 0), (0.1, 10, 0), (0.01, 100, 0),
                                                          (0.025, 1000, 3), (9.0, 1000, 8)])  # fmt: skip
def test_workers_are_started_when_reading_is_slow(
    monkeypatch: pytest.MonkeyPatch, step_s: float, last: int, expected: int
) -> None:
    monkeypatch.setattr(selection, "measure_read_s", lambda *_: step_s)
    monkeypatch.setattr(selection, "cores_per_rank", lambda: 64)
    reader = MicroBatchReader(DatasetSource(Noisy()), seed=0, count=1)

    assert selection.estimate_worker_count(reader, BatchPlan(64, 8, seed=0), last=last) == expected


def test_a_cheap_dataset_and_tensors_have_no_workers() -> None:
    assert train(steps=30).plan.workers == 0
    rows = torch.randn(64, 4)
    assert train((rows, rows[:, :1]), steps=30, workers=2).plan.workers is None


@pytest.mark.usefixtures("forks")
def test_waiting_and_reading_times_are_reported() -> None:
    batches = BatchPlan(64, 8, seed=5)
    inline = InlineLoader(MicroBatchReader(DatasetSource(Noisy()), seed=5, count=1))
    inline.take(1, batches.indices(1))
    assert inline.waited_s == inline.reading_s > 0

    with closing(workers_over(Noisy(), count=1)) as loader:
        take = functools.partial(loader.take, 1, batches.indices(1))
        take()
        assert loader.waited_s > 0
        assert loader.reading_s > 0
