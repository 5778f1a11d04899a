"""A DataLoader of torch as data: its dataset, batch size, workers, order and functions.

`fit` reads samples by indices that depend on the seed and the step, so that a run resumes exactly. What a loader
decides in another way (its own sampler, batches that a dataset makes itself, a stream) is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from falaj.training.runtime.errors import InvalidTraining, TrainingFault

Collate = Callable[[list[Any]], Any]


def loader_options(data: object) -> dict[str, Any]:
    """Return the options of `fit` that a DataLoader states; none for other data, or one that is refused later."""
    if not isinstance(data, DataLoader) or data.batch_size is None:
        return {}
    options: dict[str, Any] = {
        "batch_size": data.batch_size,
        "drop_last": data.drop_last,
        "workers": data.num_workers,
        "shuffle": is_shuffled(data),
    }
    if data.num_workers and data.prefetch_factor:
        options["prefetch"] = data.prefetch_factor
    return options


def is_shuffled(loader: DataLoader[Any]) -> bool:
    sampler = loader.sampler
    return (
        sampler.shuffle
        if isinstance(sampler, DistributedSampler)
        else not isinstance(sampler, SequentialSampler)
    )


def loader_dataset(loader: DataLoader[Any], *, where: str) -> Any:
    """Return the dataset of `loader`, or its part that the sampler draws from. Raise InvalidTraining otherwise."""
    faults = loader_faults(loader, where)
    if faults:
        raise InvalidTraining("the DataLoader cannot be used", faults=faults)
    sampler, dataset = loader.sampler, loader.dataset
    return Subset(dataset, list(sampler.indices)) if type(sampler) is SubsetRandomSampler else dataset


def loader_collate(loader: DataLoader[Any]) -> Collate | None:
    """Return the collate function that the caller has given; None for that of torch."""
    return None if loader.collate_fn is default_collate else loader.collate_fn


def loader_faults(loader: DataLoader[Any], where: str) -> list[TrainingFault]:
    if isinstance(loader.dataset, IterableDataset):
        return [
            TrainingFault(
                f"{where}.dataset",
                f"{type(loader.dataset).__name__}, a stream",
                "a dataset with __len__ and __getitem__: steps read samples by index",
                "a map-style dataset, or fj.step in a loop of your own",
            )
        ]
    if type(loader.batch_sampler) is not BatchSampler:
        given = "batch_size=None" if loader.batch_sampler is None else type(loader.batch_sampler).__name__
        return [
            TrainingFault(
                f"{where}.batch_sampler",
                given,
                "a loader with a batch_size: fit addresses its batches by seed and step",
                "DataLoader(dataset, batch_size=32), or fj.step in a loop of your own",
            )
        ]
    return sampler_faults(loader.sampler, where)


def sampler_faults(sampler: Any, where: str) -> list[TrainingFault]:
    """Return a fault for a sampler that draws other samples than each one once."""
    known = (SequentialSampler, RandomSampler, SubsetRandomSampler, DistributedSampler)
    given = type(sampler).__name__
    if type(sampler) is RandomSampler and (
        sampler.replacement or sampler.num_samples != len(sampler.data_source)
    ):
        given = f"RandomSampler(replacement={sampler.replacement}, num_samples={sampler.num_samples})"
    elif type(sampler) in known:
        return []
    return [
        TrainingFault(
            f"{where}.sampler",
            given,
            "each sample once per epoch: shuffle=True or False, SubsetRandomSampler, DistributedSampler",
            "weights in the loss, a dataset with the samples repeated, or fj.step in a loop of your own",
        )
    ]
