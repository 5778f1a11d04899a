"""Stateless random numbers: generators are seeded per step and micro-batch, so a resumed step draws the same."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

_packed = struct.Struct("<qqq").pack


def derive_seed(purpose: bytes, seed: int, major: int, minor: int = 0) -> int:
    """Return a 63-bit seed that depends on the arguments only. `purpose` has at most 16 bytes."""
    digest = blake2b(_packed(seed, major, minor), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little") >> 1


class StepRng:
    """Seeds the generators of torch on the CPU and `device`, Python and numpy by (seed, step, micro-batch).

    Seeding Python and numpy takes 20 µs and few models use them: after the first step they are seeded only if used.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self.always_seeds_python = False
        """Whether reading samples may use Python's and numpy's generators, so that they are always seeded."""
        self._seeds_python = True
        self._python_seed: int | None = None
        self._generators = [torch.default_generator]  # torch.manual_seed does the same, but takes 130 µs
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            place = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[place])

    def get_state(self) -> bytes:
        """Return the state of the generators, for `set_state` in another process with the same type of device."""
        states = torch.cat([generator.get_state() for generator in self._generators])
        found = bytearray(len(states))
        torch.frombuffer(found, dtype=torch.uint8).copy_(states)
        return bytes(found)

    def set_state(self, state: bytes) -> None:
        states = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        lengths = [len(generator.get_state()) for generator in self._generators]
        for generator, own in zip(self._generators, torch.split(states, lengths), strict=True):
            generator.set_state(own.clone())

    def seed_step(self, step: int, micro_batch: int) -> None:
        number = derive_seed(b"dropout", self._seed, step, micro_batch)
        for generator in self._generators:
            generator.manual_seed(number)
        if self._seeds_python:
            self._python_seed = number
            seed_python(number)

    def detect_python_draws(self) -> None:
        """Continue to seed Python's and numpy's generators only if the last step has used them."""
        self._seeds_python = self.always_seeds_python or (
            self._python_seed is not None and python_rng_was_used(self._python_seed)
        )


def seed_everything(number: int) -> None:
    """Seed the global generators that a dataset may draw from: torch, random, and numpy if it is loaded."""
    torch.default_generator.manual_seed(number)
    seed_python(number)


def seed_python(number: int) -> None:
    """Seed Python's generator, and numpy's if it is loaded."""
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


def python_rng_was_used(number: int) -> bool:
    """Return whether Python's or numpy's generator was used since it was seeded with `number`."""
    if random.getstate() != random.Random(number).getstate():  # noqa: S311 - nothing secret
        return True
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    fresh, now = numpy.random.RandomState(number & 0xFFFFFFFF).get_state(), numpy.random.get_state()
    return fresh[2:] != now[2:] or bool((fresh[1] != now[1]).any())


@contextmanager
def preserved_rng_state() -> Iterator[None]:
    """Restore the state of torch's, Python's and, if it is loaded, numpy's generators at the end."""
    own, python = torch.default_generator.get_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    numpy = sys.modules.get("numpy")
    numbers = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.default_generator.set_state(own)
        random.setstate(python)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        if numpy:
            numpy.random.set_state(numbers)
