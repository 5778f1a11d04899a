"""The forms of data that `fit` accepts, read by sample indices into batches of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from falaj.training.runtime.data.arrays import is_array, is_frame, is_mapped, is_series, to_columns
from falaj.training.runtime.data.errors import ragged_batch, unreadable_sample, unusable_data
from falaj.training.runtime.data.torch_loaders import loader_collate, loader_dataset
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


class DataFrame(Protocol):
    """A data frame of pandas or polars, or another with columns and an Arrow stream."""

    @property
    def columns(self) -> Any: ...


class Array(Protocol):
    """A NumPy array."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


Columns: TypeAlias = Tensor | Array | DataFrame
Data: TypeAlias = (
    Columns | tuple[Columns, ...] | Mapping[str, Columns] | Dataset | DataLoader[Any] | Tabular | str | Path
)
"""Tensors or arrays; a dataset or a DataLoader; or a table: a frame, of pyarrow, or the path of a file or folder."""


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
    """Return `data` as a source. Tensors and arrays are columns; a list is a dataset.

    `inputs` and `target` name columns of a table, or values of a dict.
    """
    if isinstance(data, TensorSource | DatasetSource):
        return data
    if is_table(data):
        from falaj.training.runtime.data.arrow.tables import open_table

        return open_table(data, inputs=inputs, target=target, where=where)
    named = None if inputs is None and target is None else NamedValues(inputs, target, where != "evaluate")
    if isinstance(data, DataLoader):
        found, collate = loader_dataset(data, where=where), loader_collate(data)
        if not isinstance(found, TensorDataset) or collate is not None:
            return open_dataset(
                found, where=where, named=named, collate=collate, worker_init=data.worker_init_fn
            )
        data = found
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, Tensor | tuple | Mapping) or is_array(data) or is_series(data):
        columns, mapped = to_columns(data, where=where), is_mapped(data)
        if named is not None:
            columns = named.split(columns, where=where)
        return TensorSource(columns, where=where, mapped=mapped)
    return open_dataset(data, where=where, named=named)


def open_dataset(
    data: Any,
    *,
    where: str,
    named: NamedValues | None,
    collate: Callable[[list[Any]], Batch] | None = None,
    worker_init: Callable[[int], None] | None = None,
) -> DatasetSource:
    """Return a map-style dataset as a source."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        allowed = "tensors, or a dataset with __len__ and __getitem__: steps read samples by index"
        raise unusable_data(where, type(data).__name__, allowed)
    dataset = cast(Dataset, data)
    if len(dataset) == 0:
        raise unusable_data(where, "no samples", "at least one sample")
    if named is not None and collate is None:
        named.check(dataset, where=where)
    return DatasetSource(dataset, collate=collate, named=named, worker_init=worker_init)


def is_table(data: object) -> bool:
    """Return whether `data` is a data frame, an Arrow object or a path, without importing pyarrow."""
    of_arrow = type(data).__module__.partition(".")[0] == "pyarrow"
    return isinstance(data, str | Path) or of_arrow or is_frame(data)


def is_named_data(data: object) -> bool:
    """Return whether `inputs` and `target` may name parts of `data`: of a table, a dict, or samples that are dicts."""
    if data is None or isinstance(data, Tensor | tuple | TensorDataset | TensorSource | DatasetSource):
        return False
    return is_table(data) or is_sampled(data)


def is_sampled(data: object) -> bool:
    """Return whether `data` is a DataLoader, or has samples by index."""
    has_samples = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return isinstance(data, DataLoader) or (has_samples and not is_array(data) and not isinstance(data, str))


class NamedValues(NamedTuple):
    """The values of a dict that are the model's inputs, and those that are the target of the loss."""

    inputs: Sequence[str] | None
    target: str | Sequence[str] | None
    is_required: bool = True
    """Whether a tuple is refused; data to evaluate may be tuples where the training data is a table."""

    def split(self, batch: Batch, *, where: str = "data") -> Batch:
        """Return a dict as (inputs, target): a value by itself if it is the only one, several as a dict."""
        targets = (self.target,) if isinstance(self.target, str) else tuple(self.target or ())
        if not isinstance(batch, Mapping):
            if isinstance(batch, tuple) and not self.is_required:
                return batch
            named = (("inputs", self.inputs), ("target", self.target))
            given = ", ".join(f"{name}={value!r}" for name, value in named if value is not None)
            allowed = "only for a table or a dict, whose values have names; of a tuple, the last member is the target"
            raise unusable_data(where, f"a {type(batch).__name__}, with {given}", allowed)
        wanted = [name for name in batch if name not in targets] if self.inputs is None else list(self.inputs)
        if missing := [name for name in (*wanted, *targets) if name not in batch]:
            raise unusable_data(
                where, f"no value {', '.join(map(str, missing))}", f"names of {', '.join(map(str, batch))}"
            )
        if not wanted:
            raise unusable_data(where, "only the target", "at least one value beside the target")
        if not targets:
            return _only_or_all(batch, wanted)
        return _only_or_all(batch, wanted), _only_or_all(batch, targets)

    def check(self, dataset: Dataset, *, where: str) -> None:
        """Raise InvalidTraining if the samples of `dataset` do not have these names."""
        try:
            sample = dataset[0]
        except Exception:  # the run will name the sample
            return
        self.split(tuple(sample) if isinstance(sample, list) else sample, where=where)


def _only_or_all(batch: Mapping[str, Any], names: Sequence[str]) -> Any:
    return batch[names[0]] if len(names) == 1 else {name: batch[name] for name in names}


class TensorSource:
    """Tensors whose first dimension is the sample."""

    def __init__(
        self,
        columns: Batch,
        *,
        where: str,
        mapped: bool = False,
    ) -> None:
        """`mapped`: the tensors are memory-mapped files, and reads may be slow."""
        self.columns, self.mapped = columns, mapped
        self._len = _rows(columns, where=where)
        self.device = device_of(columns)
        self._is_flat = isinstance(columns, tuple) and all(isinstance(each, Tensor) for each in columns)

    def __len__(self) -> int:
        return self._len

    @property
    def size_bytes(self) -> int:
        sizes: list[int] = []
        map_tensors(self.columns, lambda column: sizes.append(column.nbytes) or column)  # type: ignore[func-returns-value]
        return sum(sizes)

    def on(self, device: torch.device) -> TensorSource:
        """Return the same columns on `device`."""
        return TensorSource(map_tensors(self.columns, lambda column: column.to(device)), where="data")

    def thinned(self, most: int) -> TensorSource:
        """Return at most `most` samples, evenly spaced."""
        stride = -(-len(self) // most)
        return TensorSource(
            map_tensors(self.columns, lambda column: column[::stride].contiguous()), where="data"
        )

    def read(self, indices: Tensor, *, seed: int) -> Batch:
        columns = self.columns
        if self.device.type != "cpu":
            indices = indices.to(self.device, non_blocking=True)
        if self._is_flat:  # the usual case, in a few microseconds
            return tuple([column.index_select(0, indices) for column in columns])
        return map_tensors(columns, lambda column: column.index_select(0, indices))


class DatasetSource:
    """A map-style dataset."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        collate: Callable[[list[Any]], Batch] | None = None,
        named: NamedValues | None = None,
        worker_init: Callable[[int], None] | None = None,
    ) -> None:
        """`collate`: the caller's own; `named`: the parts of a dict; `worker_init` is called in each worker process."""
        self.dataset, self.own_collate = dataset, collate
        self.named, self.worker_init = named, worker_init
        self.note: Callable[[int], None] | None = None
        """Called with each sample before it is read, so that a crash can be attributed."""
        self.collate: Callable[[list[Any]], Batch] = collate or default_collate
        self._len = len(dataset)

    def __len__(self) -> int:
        return self._len

    def read(self, indices: Tensor, *, seed: int) -> Batch:
        seed_everything(seed)
        wanted: list[int] = indices.tolist()
        read_many = getattr(self.dataset, "__getitems__", None)
        samples = self._together(read_many, wanted) if read_many else [self._one(index) for index in wanted]
        if self.own_collate is None:
            batch = collate_samples(samples, wanted, collate=self.collate)
        else:
            batch = self._collate(self.own_collate, samples, wanted)
        return batch if self.named is None else self.named.split(batch)

    def _collate(
        self, collate: Callable[[list[Any]], Batch], samples: list[Any], indices: list[int]
    ) -> Batch:
        try:
            batch = collate(samples)
        except Exception as error:
            if isinstance(error, TrainingError) or is_out_of_memory(error):
                raise
            raise unreadable_sample(indices[0], error, among=len(indices)) from error
        return tuple(batch) if isinstance(batch, list) else batch

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


def device_of(columns: Batch) -> torch.device:
    """Return the device of the first column; all must be there."""
    if isinstance(columns, Tensor):
        return columns.device
    return device_of(next(iter(columns.values() if isinstance(columns, Mapping) else columns)))


def _rows(columns: Batch, *, where: str) -> int:
    """Return the number of samples in `columns`; all must have the same."""
    if isinstance(columns, Tensor):
        named: Mapping[Any, Any] = {"": columns}
    else:
        named = dict(enumerate(columns)) if isinstance(columns, tuple) else columns
    nested = {name: column for name, column in named.items() if isinstance(column, Mapping) and column}
    named = {
        **{name: column for name, column in named.items() if name not in nested},
        **{f"{name}.{each}": value for name, held in nested.items() for each, value in held.items()},
    }
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
