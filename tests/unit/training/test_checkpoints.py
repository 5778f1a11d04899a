"""A checkpoint is self-verifying parts and a manifest in a folder, without pickle."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from falaj.training.runtime.checkpointing.checkpointer import Checkpointer
from falaj.training.runtime.checkpointing.state import CheckpointState, collect_state
from falaj.training.runtime.checkpointing.storage.folder import CheckpointFolder
from falaj.training.runtime.checkpointing.storage.manifest import decode_manifest
from falaj.training.runtime.checkpointing.storage.store import Retention, SaveId
from falaj.training.runtime.errors import CheckpointDamaged, InvalidTraining
from falaj.training.runtime.fit import fit
from falaj.training.runtime.parallel.process_group import ProcessGroup
from power_cuts import recorded_disk

TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "half": torch.randn(5).to(torch.bfloat16),
    "whole": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "nothing": torch.empty(0, 3),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "complex": torch.tensor([1 + 2j]).conj(),
}
NUMBERS: dict[str, Any] = {"optimizer/π/step": 3, "optimizer/π/rate": 0.1}


def kept(folder: Path, tensors: dict[str, Tensor], *, step: int = 3) -> Path:
    """Save a checkpoint of `tensors`, and return its folder."""
    checkpointer = Checkpointer(CheckpointFolder(folder), ProcessGroup())
    state = CheckpointState(tensors, {}, NUMBERS, frozenset(["matrix"]))
    checkpointer.save(state, step=step, run={"words": "…"}, retention=Retention()).written.result()
    checkpointer.close()
    return folder / f"step-{step:010}"


def read(folder: Path) -> dict[str, Tensor]:
    checkpointer = Checkpointer(CheckpointFolder(folder), ProcessGroup())
    try:
        found = checkpointer.load(lambda manifest: dict.fromkeys(manifest.tensor_infos), notify=print)
    finally:
        checkpointer.close()
    assert found is not None
    return found[1]


def test_tensors_are_restored_exactly(tmp_path: Path) -> None:
    path = kept(tmp_path, TENSORS)

    found = read(tmp_path)

    assert found.keys() == TENSORS.keys()
    for name, tensor in found.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert tensor.shape == TENSORS[name].shape
        assert torch.equal(tensor, TENSORS[name])
    manifest = decode_manifest((path / "manifest.json").read_bytes(), step=3)
    assert (manifest.run, manifest.numbers) == ({"words": "…"}, NUMBERS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Return a checkpoint, and the bytes of its files."""
    folder = tmp_path_factory.mktemp("kept")
    path = kept(folder, TENSORS)
    return folder, {each.name: each.read_bytes() for each in path.iterdir()}


@given(name=st.sampled_from(["part-00000", "manifest.json"]), place=st.floats(0, 1), bit=st.integers(0, 7))
def test_an_altered_bit_is_detected_unless_it_is_padding(
    files: tuple[Path, dict[str, bytes]], name: str, place: float, bit: int
) -> None:
    folder, whole = files
    data = bytearray(whole[name])
    data[int(place * (len(data) - 1))] ^= 1 << bit
    (folder / "step-0000000003" / name).write_bytes(data)

    try:
        found = read(folder)
    except CheckpointDamaged:
        pass
    else:
        assert name != "manifest.json"
        assert all(torch.equal(found[each], tensor) for each, tensor in TENSORS.items())
    finally:
        (folder / "step-0000000003" / name).write_bytes(whole[name])


@given(name=st.sampled_from(["part-00000", "manifest.json"]), share=st.floats(0, 0.9))
def test_a_truncated_file_is_detected(files: tuple[Path, dict[str, bytes]], name: str, share: float) -> None:
    folder, whole = files
    (folder / "step-0000000003" / name).write_bytes(whole[name][: int(share * len(whole[name]))])

    with pytest.raises(CheckpointDamaged):
        read(folder)

    (folder / "step-0000000003" / name).write_bytes(whole[name])


def test_nothing_in_a_checkpoint_is_pickled_or_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "dump", "dumps"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    rows = torch.randn(16, 3)

    for steps in (3, 6):
        fit(
            nn.Linear(3, 3),
            nn.functional.mse_loss,
            rows,
            steps=steps,
            batch_size=4,
            run=tmp_path,
            device="cpu",
            tune="off",
        )

    for path in (tmp_path / "checkpoints").glob("*/*"):
        data = path.read_bytes()
        assert data.startswith((b"FALAJPT1", b'{"sha256": "'))
        assert b"torch._utils" not in data


def test_an_uncommitted_draft_is_not_a_checkpoint_and_is_removed(tmp_path: Path) -> None:
    kept(tmp_path, TENSORS)
    store = CheckpointFolder(tmp_path)
    draft = tmp_path / f".step-0000000009.{'0' * 32}"
    draft.mkdir()
    (draft / "manifest.json").write_bytes(b"whole")

    assert store.steps() == [3]
    Checkpointer(store, ProcessGroup()).close()

    assert not draft.exists()


def test_a_committed_checkpoint_in_a_new_folder_survives_a_power_cut(tmp_path: Path) -> None:
    save = SaveId(7, "0" * 32)
    with recorded_disk() as disk:
        store = CheckpointFolder(tmp_path / "runs" / "first" / "checkpoints")
        store.save_part(save, 0, [b"weights"])
        store.commit(save, [7], b"{}", Retention())

    assert disk.cut_power(tmp_path) == []
    assert store.steps() == [7]


def test_the_newest_and_the_best_checkpoints_stay(tmp_path: Path) -> None:
    assert Retention(2, best=1).gone([0, 1, 2, 3, 9], newest=4) == [2, 0, 9]
    assert Retention(3).gone([4], newest=4) == []


# ----------------------------------------------------------------------------------------------- state


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.last = nn.Linear(4, 10, bias=False)
        self.last.weight = self.table.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.table(x))
        return out


def test_tied_parameters_are_stored_once_under_names_of_the_model(tmp_path: Path) -> None:
    model = Tied()
    optimizer = optim.AdamW(model.parameters())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()

    state = collect_state(model, optimizer)

    assert set(state.tensors) == {
        "model/table.weight",
        "model/seen",
        *(f"optimizer/table.weight/{key}" for key in ("step", "exp_avg", "exp_avg_sq")),
    }
    assert state.shared == {"model/last.weight": "model/table.weight"}
    assert "model/seen" not in state.updated
    assert "model/table.weight" in state.updated


def test_tied_parameters_of_other_stages_stay_tied() -> None:
    """As in a process whose shard is empty: the others report that they are tied."""
    model = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
    model["a"].weight = model["b"].weight = nn.Parameter(torch.empty(0, 4))

    state = collect_state(model, optim.SGD(model.parameters(), lr=0.1))

    assert state.shared == {"model/b.weight": "model/a.weight"}
    assert "model/a.weight" in state.updated


def test_a_tied_model_resumes(tmp_path: Path) -> None:
    words = torch.randint(10, (40, 3), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"batch_size": 8, "device": "cpu", "checkpoint_every": 2, "tune": "off"}

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())

    def train(steps: int, run: Path | None) -> list[float]:
        torch.manual_seed(0 if run is None or not run.exists() else 9)
        return fit(Tied(), loss, (words, words), steps=steps, run=run, **options).losses

    assert train(4, tmp_path / "run") + train(8, tmp_path / "run") == train(8, None)


def test_parameters_of_other_stages_are_not_held() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))

    state = collect_state(model, optim.SGD(model[0].parameters(), lr=0.1))

    assert set(state.tensors) == {"model/0.weight", "model/0.bias"}


def test_state_that_needs_pickle_is_refused() -> None:
    class Odd(optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.state[self.param_groups[0]["params"][0]]["memory"] = [1, 2]

    model = nn.Linear(2, 2)
    optimizer = Odd(model.parameters(), lr=0.1)
    optimizer.step()

    with pytest.raises(InvalidTraining, match="optimizer/weight/memory"):
        collect_state(model, optimizer)


def test_a_checkpoint_of_many_files_needs_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path, {f"layer.{number}": torch.randn(50) for number in range(200)})
    reads: list[int] = []
    real = CheckpointFolder.load_part

    def counted(self: CheckpointFolder, step: int, number: int, *, offset: int, length: int) -> bytearray:
        reads.append(length)
        return real(self, step, number, offset=offset, length=length)

    monkeypatch.setattr(CheckpointFolder, "load_part", counted)
    read(tmp_path)

    assert len(reads) == 2  # the header, and all the tensors


def test_only_needed_tensors_are_read(tmp_path: Path) -> None:
    path = kept(tmp_path, {"mine": torch.ones(100_000), "theirs": torch.ones(100_000)})
    data = bytearray((path / "part-00000").read_bytes())
    data[-8] ^= 1  # in a part that is not needed
    (path / "part-00000").write_bytes(data)
    checkpointer = Checkpointer(CheckpointFolder(tmp_path), ProcessGroup())

    found = checkpointer.load(lambda _: {"mine": None}, notify=print)

    checkpointer.close()
    assert found is not None
    assert torch.equal(found[1]["mine"], torch.ones(100_000))
    assert os.listdir(tmp_path) == ["step-0000000003"]
