"""New ids: unique, and in the order in which a process makes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from falaj.records.names import new_id


def test_ids_of_one_millisecond_are_in_order() -> None:
    made = [new_id("run") for _ in range(5000)]

    assert made == sorted(made)
    assert len(set(made)) == len(made)


def test_ids_of_several_threads_are_unique() -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: new_id("run"), range(8000)))

    assert len(set(made)) == len(made)
