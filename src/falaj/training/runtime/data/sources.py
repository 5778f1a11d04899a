"""The forms of data that `fit` accepts, read by sample indices into batches of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from falaj.training.runtime.data.errors import ragged_batch, unreadable_sample, unusable_data
from falaj.training.runtime.errors import TrainingError
from falaj.training.runtime.step.out_of_memory import is_out_of_memory
from falaj.training.runtime.step.rng import seed_everything

Batch: TypeAlias = Any
"""A tensor, or a tuple or dict of batches. The last member of a tuple is the target."""


class Dataset(Protocol):
    """A map-style dataset: torch's, a list of samples, or any object with these methods."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Tabular(Protocol):
    """A pyarrow table, record batch, record batch reader or dataset."""

    @property
    def schema(self) -> Any: ...


Data: TypeAlias = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor] | Dataset | Tabular | str | Path
"""Tensors; a dataset; or a table: of pyarrow, or the path of a Parquet or Arrow file or folder."""


class SampleSource(Protocol):
    """Samples that are read by index."""

    def __len__(self) -> int: ...

    def read(self, indices: Tensor, *, seed: int) -> Batch:
        """Return the batch of `indices`. Random augmentation is seeded with `seed`."""


def open_data(
    data: Data,
    *,
    where: str = "data",
    inputs: Sequence[str] | None = None,
    target: str | Sequence[str] | None = None,
) -> SampleSource:
    """Return `data` as a source. Tensors are columns; a list is a dataset; `inputs` and `target` name table columns."""
    if isinstance(data, TensorSource | DatasetSource):
        return data
    if is_table(data):
        from falaj.training.runtime.data.arrow.tables import open_table

        return open_table(data, inputs=inputs, target=target, where=where)
    if inputs is not None or target is not None:
        given = ", ".join(f"{n}={v!r}" for n, v in (("inputs", inputs), ("target", target)) if v is not None)
        allowed = "only for a table, whose columns have names; of a tuple, the last member is the target"
        raise unusable_data(where, f"a {type(data).__name__}, with {given}", allowed)
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, Tensor | tuple | Mapping):
        return TensorSource(data, where=where)
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        allowed = "tensors, or a dataset with __len__ and __getitem__: steps read samples by index"
        raise unusable_data(where, type(data).__name__, allowed)
    dataset = cast(Dataset, data)
    if len(dataset) == 0:
        raise unusable_data(where, "no samples", "at least one sample")
    return DatasetSource(dataset)


def is_table(data: object) -> bool:
    """Return whether `data` is an Arrow object or a path, without importing pyarrow."""
    return isinstance(data, str | Path) or type(data).__module__.partition(".")[0] == "pyarrow"


class TensorSource:
    """Tensors whose first dimension is the sample."""

    def __init__(
        self,
        columns: Tensor | tuple[Tensor, ...] | Mapping[str, Tensor],
        *,
        where: str,
        mapped: bool = False,
    ) -> None:
        """`mapped`: the tensors are memory-mapped files, and reads may be slow."""
        self._columns, self.mapped = columns, mapped
        self._len = _rows(columns, where=where)
        self.device = device_of(columns)

    def __len__(self) -> int:
        return self._len

    @property
    def size_bytes(self) -> int:
        sizes: list[int] = []
        map_tensors(self._columns, lambda column: sizes.append(column.nbytes) or column)  # type: ignore[func-returns-value]
        return sum(sizes)

    def on(self, device: torch.device) -> TensorSource:
        """Return the same columns on `device`."""
        return TensorSource(map_tensors(self._columns, lambda column: column.to(device)), where="data")

    def thinned(self, most: int) -> TensorSource:
        """Return at most `most` samples, evenly spaced."""
        stride = -(-len(self) // most)
        return TensorSource(
            map_tensors(self._columns, lambda column: column[::stride].contiguous()), where="data"
        )

    def read(self, indices: Tensor, *, seed: int) -> Batch:
        columns = self._columns
        if self.device.type != "cpu":
            indices = indices.to(self.device, non_blocking=True)
        if isinstance(columns, tuple):
            return tuple([column.index_select(0, indices) for column in columns])
        return map_tensors(columns, lambda column: column.index_select(0, indices))


class DatasetSource:
    """A map-style dataset."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.note: Callable[[int], None] | None = None
        """Called with each sample before it is read, so that a crash can be attributed."""
        self.collate: Callable[[list[Any]], Batch] = default_collate
        self._len = len(dataset)

    def __len__(self) -> int:
        return self._len

    def read(self, indices: Tensor, *, seed: int) -> Batch:
        seed_everything(seed)
        wanted: list[int] = indices.tolist()
        read_many = getattr(self.dataset, "__getitems__", None)
        samples = self._together(read_many, wanted) if read_many else [self._one(index) for index in wanted]
        return collate_samples(samples, wanted, collate=self.collate)

    def _one(self, index: int) -> Any:
        if self.note is not None:
            self.note(index)
        try:
            return self.dataset[index]
        except TrainingError:
            raise
        except Exception as error:
            raise unreadable_sample(index, error) from error

    def _together(self, read_many: Callable[[list[int]], list[Any]], wanted: list[int]) -> list[Any]:
        if self.note is not None:
            self.note(wanted[0])
        try:
            return read_many(wanted)
        except TrainingError:
            raise
        except Exception as error:
            raise unreadable_sample(wanted[0], error, among=len(wanted)) from error


def collate_samples(
    samples: list[Any], indices: list[int], *, collate: Callable[[list[Any]], Batch] = default_collate
) -> Batch:
    """Return `samples` as one batch; tuples and lists of values become a tuple."""
    try:
        batch = collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        if is_out_of_memory(error):
            raise
        raise ragged_batch(samples, indices, str(error)) from error
    return tuple(batch) if isinstance(batch, list) else batch


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return `batch` with `change` applied to every tensor; other values stay."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, tuple | list):
        return tuple([map_tensors(part, change) for part in batch])
    if isinstance(batch, Mapping):
        return {name: map_tensors(part, change) for name, part in batch.items()}
    return batch


def device_of(columns: Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]) -> torch.device:
    """Return the device of the first column; all must be there."""
    if isinstance(columns, Tensor):
        return columns.device
    return next(iter(columns.values() if isinstance(columns, Mapping) else columns)).device


def _rows(columns: Tensor | tuple[Tensor, ...] | Mapping[str, Tensor], *, where: str) -> int:
    """Return the number of samples in `columns`; all must have the same."""
    if isinstance(columns, Tensor):
        named: Mapping[Any, Tensor] = {"": columns}
    else:
        named = dict(enumerate(columns)) if isinstance(columns, tuple) else columns
    if not named or not all(isinstance(column, Tensor) and column.dim() for column in named.values()):
        raise unusable_data(
            where, {n: type(c).__name__ for n, c in named.items()}, "tensors with a row per sample"
        )
    if isinstance(columns, tuple) and len(columns) < 2:
        raise unusable_data(where, "one tensor in a tuple", "(inputs, target), or the tensor alone")
    rows = {name: len(column) for name, column in named.items()}
    if len(set(rows.values())) > 1:
        raise unusable_data(where, f"rows by column: {rows}", "the same number of rows in each")
    if not (count := next(iter(rows.values()))):
        raise unusable_data(where, "no samples", "at least one sample")
    return count


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return `batch` on `device`."""
    return batch if device.type == "cpu" else map_tensors(batch, lambda t: t.to(device, non_blocking=True))
