"""State of the caller's functions that a plan search must not change: defaults, closures and globals."""

from __future__ import annotations

import builtins
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from falaj.training.runtime.planning.fingerprint import global_names, is_installed

MAX_FUNCTIONS = 100
SHARED_BYTES = 16 << 20
"""A larger tensor is assumed to be data: trials share it instead of copying it."""
SLOW_S = 0.5
"""A value that takes longer to copy is copied only once, to bound the time of the search."""
MISSING = object()


@dataclass(frozen=True, eq=False)
class StateVariable:
    """A place where a function keeps state: an attribute or a global name."""

    holder: Any
    name: str

    def get(self) -> Any:
        if isinstance(self.holder, dict):
            return self.holder.get(self.name, MISSING)
        try:
            return getattr(self.holder, self.name)
        except (AttributeError, ValueError):  # a cell that is empty
            return MISSING

    def put(self, value: Any) -> None:
        if value is not MISSING:
            if isinstance(self.holder, dict):
                self.holder[self.name] = value
            else:
                setattr(self.holder, self.name, value)
        elif isinstance(self.holder, dict):
            self.holder.pop(self.name, None)
        elif self.get() is not MISSING:
            delattr(self.holder, self.name)


class FunctionState:
    """The state of the caller's functions besides their arguments. Trials work on copies in the same places."""

    def __init__(self, *callables: object) -> None:
        self._kept = [(variable, variable.get()) for variable in state_variables(*callables)]
        self._slow: set[StateVariable] = set()

    def install_copies(self, copies: dict[int, Any]) -> None:
        """Install copies of the original values. `copies` is the memo of `deepcopy` with what was copied already."""
        for variable, value in self._kept:
            began = time.monotonic()
            variable.put(value if variable in self._slow else copy_of(value, copies))
            if time.monotonic() - began > SLOW_S:
                self._slow.add(variable)

    def restore(self) -> None:
        """Install the original values again."""
        for variable, value in self._kept:
            variable.put(value)


def state_variables(*callables: object) -> list[StateVariable]:
    """Return the state of these functions, and of functions that they call from the same file or close over."""
    waiting = [function for each in callables for function in functions_in(each)]
    seen: list[FunctionType] = []
    found: dict[tuple[int, str], StateVariable] = {}
    while waiting and len(seen) < MAX_FUNCTIONS:
        function = waiting.pop()
        if any(function is each for each in seen) or is_installed(function.__module__):
            continue
        seen.append(function)
        for variable in _of_function(function):
            found.setdefault((id(variable.holder), variable.name), variable)
            waiting.extend(functions_in(variable.get(), within=function.__globals__))
    return list(found.values())


def _of_function(function: FunctionType) -> Iterator[StateVariable]:
    for name in ("__defaults__", "__kwdefaults__", "__dict__"):
        yield StateVariable(function, name)
    for cell in function.__closure__ or ():
        yield StateVariable(cell, "cell_contents")
    for name in global_names(function.__code__):
        if name in function.__globals__ or not hasattr(builtins, name):
            yield StateVariable(function.__globals__, name)


def functions_in(value: object, *, within: dict[str, Any] | None = None) -> Iterator[FunctionType]:
    """Yield the functions that run when `value` is called; with `within`, only those of the same file."""
    if isinstance(value, partial):
        yield from functions_in(value.func, within=within)
        return
    plain = value.__func__ if isinstance(value, MethodType) else value
    named = [plain, *(getattr(type(plain), name, None) for name in ("__call__", "forward"))]
    for each in named if not isinstance(plain, type) else ():
        if isinstance(each, FunctionType) and (within is None or each.__globals__ is within):
            yield each


def is_immutable_code(value: object) -> bool:
    """Return whether `value` is code, which does not change while it is used."""
    return isinstance(value, ModuleType | type | FunctionType | BuiltinFunctionType)


def copy_of(value: Any, copies: dict[int, Any]) -> Any:
    """Return a deep copy, or the value itself if it cannot be copied or is large."""
    if value is MISSING or is_immutable_code(value):
        return value
    if isinstance(value, Tensor) and value.numel() * value.element_size() > SHARED_BYTES:
        return value
    before = set(copies)
    try:
        return copy.deepcopy(value, copies)
    except Exception:  # a lock, a file, a generator
        for half_done in set(copies) - before:
            del copies[half_done]
        return value
