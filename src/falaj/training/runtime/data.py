"""Data in any of the forms that `fit` takes, read by sample indices into batches of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from falaj.training.runtime.errors import Fault, InvalidTraining, RaggedBatch
from falaj.training.runtime.randomness import seed_everything

Batch: TypeAlias = Any
"""A tensor, or a tuple or dict of batches. Of a tuple, the last member is the target."""


class Dataset(Protocol):
    """A map-style dataset: torch's, a list of samples, or anything else with these two."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Data: TypeAlias = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor] | Dataset


class Source(Protocol):
    """Samples that are read by their indices."""

    def __len__(self) -> int: ...

    def read(self, indices: Tensor, *, seed: int) -> Batch:
        """The batch of `indices`. What is random about a sample (augmentation) is drawn from `seed`."""


def open_data(data: Data, *, where: str = "data") -> Source:
    """`data` as a source. Tensors are columns; a list is a dataset of samples."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, Tensor | tuple | Mapping):
        return Columns(data, where=where)
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        allowed = (
            "tensors, or a dataset with __len__ and __getitem__: a step must be able to address its samples"
        )
        raise _unusable(where, type(data).__name__, allowed)
    if len(data) == 0:
        raise _unusable(where, "no samples", "at least one sample")
    return Items(data)


class Columns:
    """Tensors whose first dimension counts the samples."""

    def __init__(self, columns: Tensor | tuple[Tensor, ...] | Mapping[str, Tensor], *, where: str) -> None:
        self._columns = columns
        self._len = _rows(columns, where=where)
        self.device = device_of(columns)

    def __len__(self) -> int:
        return self._len

    @property
    def size_bytes(self) -> int:
        sizes: list[int] = []
        map_tensors(self._columns, lambda column: sizes.append(column.nbytes) or column)  # type: ignore[func-returns-value]
        return sum(sizes)

    def on(self, device: torch.device) -> Columns:
        """The same columns, in the memory of `device`."""
        return Columns(map_tensors(self._columns, lambda column: column.to(device)), where="data")

    def read(self, indices: Tensor, *, seed: int) -> Batch:
        columns = self._columns
        if self.device.type != "cpu":
            indices = indices.to(self.device, non_blocking=True)
        if isinstance(columns, tuple):
            return tuple([column.index_select(0, indices) for column in columns])
        return map_tensors(columns, lambda column: column.index_select(0, indices))


class Items:
    """A map-style dataset."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._len = len(dataset)
        self._read_many: Callable[[list[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)

    def __len__(self) -> int:
        return self._len

    def read(self, indices: Tensor, *, seed: int) -> Batch:
        seed_everything(seed)
        wanted: list[int] = indices.tolist()
        samples = self._read_many(wanted) if self._read_many else [self._dataset[index] for index in wanted]
        return stack(samples, wanted)


def stack(samples: list[Any], indices: list[int]) -> Batch:
    """`samples` as one batch; tuples and lists of values become a tuple."""
    try:
        batch = default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        raise _ragged(samples, indices, str(error)) from error
    return tuple(batch) if isinstance(batch, list) else batch


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """`batch` with every tensor changed; what is no tensor (names, for example) stays as it is."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, tuple | list):
        return tuple([map_tensors(part, change) for part in batch])
    if isinstance(batch, Mapping):
        return {name: map_tensors(part, change) for name, part in batch.items()}
    return batch


def device_of(columns: Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]) -> torch.device:
    """Where the first column lies; all must lie there."""
    if isinstance(columns, Tensor):
        return columns.device
    return next(iter(columns.values() if isinstance(columns, Mapping) else columns)).device


def _rows(columns: Tensor | tuple[Tensor, ...] | Mapping[str, Tensor], *, where: str) -> int:
    """How many samples `columns` have; all must have the same number."""
    if isinstance(columns, Tensor):
        named: Mapping[Any, Tensor] = {"": columns}
    else:
        named = dict(enumerate(columns)) if isinstance(columns, tuple) else columns
    if not named or not all(isinstance(column, Tensor) and column.dim() for column in named.values()):
        raise _unusable(
            where, {n: type(c).__name__ for n, c in named.items()}, "tensors with a row per sample"
        )
    if isinstance(columns, tuple) and len(columns) < 2:
        raise _unusable(where, "one tensor in a tuple", "(inputs, target), or the tensor alone")
    rows = {name: len(column) for name, column in named.items()}
    if len(set(rows.values())) > 1:
        raise _unusable(where, f"rows by column: {rows}", "the same number of rows in each")
    if not (count := next(iter(rows.values()))):
        raise _unusable(where, "no samples", "at least one sample")
    return count


def _unusable(where: str, given: object, allowed: str) -> InvalidTraining:
    return InvalidTraining("the data cannot be used", faults=[Fault(where, given, allowed)])


def _ragged(samples: list[Any], indices: list[int], reason: str) -> RaggedBatch:
    """The error that names the first sample that is unlike the first of its batch."""
    shapes = [_shape(sample) for sample in samples]
    odd = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is None:
        return RaggedBatch("the samples of a batch cannot be stacked", faults=[Fault("data", reason)])
    given = f"sample {indices[odd]} is {shapes[odd]}, sample {indices[0]} is {shapes[0]}"
    fix = "pad or crop in the dataset's __getitem__"
    return RaggedBatch(
        "the samples of a batch differ", faults=[Fault("data", given, "one shape for all samples", fix)]
    )


def _shape(sample: Any) -> str:
    if isinstance(sample, tuple | list):
        return f"({', '.join(_shape(part) for part in sample)})"
    if isinstance(sample, Mapping):
        return f"{{{', '.join(f'{name}: {_shape(part)}' for name, part in sample.items())}}}"
    shape = getattr(sample, "shape", None)
    return type(sample).__name__ if shape is None else str(list(shape))


def move(batch: Batch, device: torch.device) -> Batch:
    """`batch` on `device`."""
    return batch if device.type == "cpu" else map_tensors(batch, lambda t: t.to(device, non_blocking=True))
