"""Batches are a pure function of (seed, step), and the ledger proves which samples were used."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from falaj.training.runtime.checkpointing.sample_ledger import SampleLedger, expected_head
from falaj.training.runtime.data.batches import BatchPlan, permutation
from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.step.rng import derive_seed

SEEDS = st.integers(0, 2**63 - 1)


def seen(plan: BatchPlan, *, epoch: int) -> list[int]:
    """Return the samples of an epoch, in order."""
    first = epoch * plan.steps_per_epoch + 1
    steps = range(first, first + plan.steps_per_epoch)
    return [index for step in steps for index in plan.indices(step).tolist()]


@given(samples=st.integers(1, 300), data=st.data(), seed=SEEDS, epoch=st.integers(0, 5))
def test_an_epoch_has_every_sample_once(samples: int, data: st.DataObject, seed: int, epoch: int) -> None:
    plan = BatchPlan(samples, data.draw(st.integers(1, samples)), seed)

    assert sorted(seen(plan, epoch=epoch)) == list(range(samples))


def test_drop_last_leaves_out_only_the_incomplete_batch() -> None:
    plan = BatchPlan(10, 4, seed=1, drop_last=True)

    samples = seen(plan, epoch=0)

    assert len(samples) == len(set(samples)) == 8
    assert plan.samples_until(3) == 12


def test_the_last_batch_of_an_epoch_is_shorter() -> None:
    plan = BatchPlan(10, 4, seed=1)

    assert [len(plan.indices(step)) for step in range(1, 7)] == [4, 4, 2, 4, 4, 2]
    assert [plan.samples_until(step) for step in range(7)] == [0, 4, 8, 10, 14, 18, 20]


def test_epochs_and_seeds_differ() -> None:
    plan, other = BatchPlan(50, 10, seed=1), BatchPlan(50, 10, seed=2)

    assert seen(plan, epoch=0) != seen(plan, epoch=1)
    assert seen(plan, epoch=0) != seen(other, epoch=0)


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    plan = BatchPlan(50, 10, seed=1)
    forward = [plan.indices(step).tolist() for step in range(1, 21)]

    permutation.cache_clear()
    torch.manual_seed(99)
    backward = [plan.indices(step).tolist() for step in range(20, 0, -1)]

    assert forward == backward[::-1]


@given(seed=SEEDS)
def test_the_order_is_that_of_splitmix64(seed: int) -> None:
    numbers = [
        splitmix64(derive_seed(b"batches", seed, 3) + place * 0x9E3779B97F4A7C15) for place in range(40)
    ]
    signed = [number - 2**64 if number >> 63 else number for number in numbers]

    order = permutation(40, seed, 3).tolist()

    assert order == sorted(range(40), key=lambda place: signed[place])


def splitmix64(number: int) -> int:
    """Vigna's finalizer, on Python's unbounded integers."""
    mask = 2**64 - 1
    number &= mask
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
    return number ^ number >> 31


@pytest.mark.parametrize(("samples", "batch_size"), [(0, 1), (3, 4)])
def test_a_dataset_smaller_than_a_batch_is_refused(samples: int, batch_size: int) -> None:
    with pytest.raises(InvalidTraining, match="smaller than one batch"):
        BatchPlan(samples, batch_size, seed=0)


# --------------------------------------------------------------------------------------------- ledger


def test_the_ledger_can_be_computed_from_the_plan() -> None:
    plan = BatchPlan(20, 6, seed=4)
    ledger = SampleLedger()
    for step in range(1, 6):
        ledger.add(step, plan.indices(step))

    resumed = SampleLedger(ledger.head)
    for step in range(6, 10):
        resumed.add(step, plan.indices(step))

    assert resumed.head == expected_head(plan, 9)


@pytest.mark.parametrize("steps", [[1, 2, 4], [1, 2, 2, 3], [2, 1, 3]], ids=["lost", "repeated", "swapped"])
def test_the_ledger_detects_missing_repeated_and_reordered_steps(steps: list[int]) -> None:
    plan = BatchPlan(20, 6, seed=4)
    ledger = SampleLedger()

    for step in steps:
        ledger.add(step, plan.indices(step))

    assert ledger.head not in {expected_head(plan, count) for count in range(5)}
