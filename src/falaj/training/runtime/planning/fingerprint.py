"""Fingerprints of objects, equal where they compute the same: from code, settings and small tensors.

A value without a fingerprint raises FingerprintError, so that nothing is cached under an incomplete key. Random
states are left out. For installed packages only the code itself counts, not what it uses in turn.
"""

from __future__ import annotations

import dis
import inspect
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from hashlib import blake2b
from logging import Logger
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn, optim

MAX_VALUES = 200_000
MAX_BYTES = 256 << 20
MAX_SECONDS = 3.0
"""Larger objects have no fingerprint: a new search costs less than a wrong cache hit."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice)
OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE; other types are written in C, and may have hidden state


class FingerprintError(TypeError):
    """The value has no description that is stable across processes."""


def fingerprint_of(value: object, *, by_shape: Iterable[Tensor] = ()) -> Any:
    """Return `value` as nested lists and strings; tensors in `by_shape`, which training changes, by dtype and
    shape."""
    try:
        return Fingerprinter(by_shape).of(value)
    except RecursionError as failure:
        raise FingerprintError("nested too deeply for a fingerprint") from failure


class Fingerprinter:
    """Traverses an object and describes each part once."""

    def __init__(self, by_shape: Iterable[Tensor]) -> None:
        self._by_shape = {id(tensor) for tensor in by_shape}
        self._numbers: dict[int, int] = {}
        self._classes: dict[int, int] = {}
        self._seen: list[object] = []
        self._values, self._bytes, self._until = MAX_VALUES, MAX_BYTES, time.monotonic() + MAX_SECONDS

    def of(self, value: object) -> Any:
        self._values -= 1
        if self._values < 0 or (self._values % 256 == 0 and time.monotonic() > self._until):
            raise FingerprintError("too large for a fingerprint")
        if type(value) in PLAIN or isinstance(value, (*OF_TORCH, PurePath)):
            return repr(value)
        if type(value) is tuple:
            return [self.of(each) for each in value]
        if id(value) in self._numbers:
            return f"#{self._numbers[id(value)]}"
        self._numbers[id(value)] = len(self._seen)
        self._seen.append(value)  # its address must not be given to another one
        return [type(value).__name__, *self._parts(value)]

    def _parts(self, value: object) -> list[Any]:
        describers: tuple[tuple[Any, Callable[[Any], list[Any]]], ...] = (
            (Tensor, self._of_tensor),
            (nn.Module, self._of_module),
            (optim.Optimizer, self._of_optimizer),
            (Enum, lambda member: [*self._of_class(type(member)), member.name]),
            (FunctionType, self._of_function),
            (MethodType, lambda method: [self.of(method.__func__), self.of(method.__self__)]),
            (partial, lambda made: [self.of(made.func), self.of(made.args), self.of(made.keywords)]),
            (BUILT_IN, self._of_built_in),
            (type, self._of_class),
            (ModuleType, lambda module: [module.__name__]),
            (Logger, lambda logger: [logger.name]),
            (SimpleNamespace, lambda held: [self._of_values(vars(held))]),
            (ReferenceType, lambda to: [self.of(to())]),
            (Mapping, lambda items: [[self.of(key), self.of(items[key])] for key in items]),
            ((set, frozenset), lambda items: sorted((self.of(each) for each in items), key=str)),
            ((list, tuple, deque), lambda items: [self.of(each) for each in items]),
        )
        for kind, describe in describers:
            if isinstance(value, kind):
                return describe(value)
        return self._of_object(value)

    def _of_object(self, value: object) -> list[Any]:
        if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # an array or a number of numpy's
            return [repr(value.dtype), repr(getattr(value, "shape", ())), self._digest(value.tobytes())]
        hidden = any(each is not object and not each.__flags__ & HEAP_TYPE for each in type(value).__mro__)
        slots = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
        if hidden or not (slots or hasattr(value, "__dict__")):
            raise FingerprintError(f"{type(value).__qualname__} has no fingerprint")
        held = {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}
        return [*self._of_class(type(value)), self._of_values({**held, **getattr(value, "__dict__", {})})]

    def _of_values(self, values: Mapping[str, object]) -> list[Any]:
        return [[name, self.of(values[name])] for name in sorted(values)]

    def _of_tensor(self, tensor: Tensor) -> list[Any]:
        kind = [str(tensor.dtype), list(tensor.shape)]
        if id(tensor) in self._by_shape or tensor.is_meta:
            return kind
        if tensor.numel() * tensor.element_size() > self._bytes:
            raise FingerprintError("tensors too large for a fingerprint")
        try:
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found = bytearray(len(flat))
            if found:
                torch.frombuffer(found, dtype=torch.uint8).copy_(flat)
        except (RuntimeError, NotImplementedError) as failure:
            raise FingerprintError(f"{type(tensor).__name__} has no fingerprint") from failure
        return [*kind, self._digest(found)]

    def _digest(self, content: bytes | bytearray) -> str:
        self._bytes -= len(content)
        if self._bytes < 0:
            raise FingerprintError("tensors too large for a fingerprint")
        return blake2b(content, digest_size=16).hexdigest()

    def _of_module(self, root: nn.Module) -> list[Any]:
        described = []
        for name, module in root.named_modules():
            self._numbers.setdefault(id(module), len(self._seen))
            self._seen.append(module)
            values = {each: value for each, value in vars(module).items() if each not in _common_to_modules()}
            hooks = [self.of(hook) for kind in HOOKS for hook in vars(module).get(kind, {}).values()]
            described.append([name, self._of_class(type(module)), self._of_values(values), hooks])
        tensors = [*root.named_parameters(), *root.named_buffers()]
        return [described, [[name, self.of(tensor)] for name, tensor in tensors]]

    def _of_optimizer(self, optimizer: optim.Optimizer) -> list[Any]:
        groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
        return [*self._of_class(type(optimizer)), self.of(groups)]

    def _of_built_in(self, function: Any) -> list[Any]:
        owner = getattr(function, "__self__", None)
        name = f"{function.__module__ if hasattr(function, '__module__') else ''}.{function.__qualname__}"
        return [name, [] if isinstance(owner, type | ModuleType | None) else self.of(owner)]

    def _of_function(self, function: FunctionType) -> list[Any]:
        name = f"{function.__module__}.{function.__qualname__}.{function.__name__}"
        cells = [self._of_cell(cell) for cell in function.__closure__ or ()]
        if function.__module__ and function.__module__.partition(".")[0] == "torch":
            return [name, cells]
        given = [self.of(function.__defaults__), self.of(function.__kwdefaults__), self.of(vars(function))]
        return [name, self._of_code(function.__code__), cells, given, self._of_globals(function)]

    def _of_cell(self, cell: Any) -> Any:
        try:
            return self.of(cell.cell_contents)
        except ValueError:
            return "empty"

    def _of_code(self, code: CodeType) -> list[Any]:
        consts = [
            self._of_code(each) if isinstance(each, CodeType) else self.of(each) for each in code.co_consts
        ]
        return [blake2b(code.co_code, digest_size=16).hexdigest(), list(code.co_names), consts]

    def _of_globals(self, function: FunctionType) -> list[Any]:
        if is_installed(function.__module__):
            return []
        there = function.__globals__
        return [
            [name, self.of(there[name])] for name in sorted(global_names(function.__code__)) if name in there
        ]

    def _of_class(self, of: type) -> list[Any]:
        """Describe the code of a class and its bases, and the globals that their methods use."""
        if id(of) in self._classes:
            return [f"class {self._classes[id(of)]}"]
        self._classes[id(of)] = len(self._classes)
        described: list[Any] = []
        for each in of.__mro__:
            described.append(code_of_class(each))
            if not is_installed(each.__module__):
                described.extend(self._of_globals(method) for method in _functions_of(each))
        return described


@lru_cache(maxsize=1024)
def code_of_class(of: type) -> str:
    """Return name and source of a class; the name alone for Python, its library and torch.

    Raise OSError or TypeError without source.
    """
    name = f"{of.__module__}.{of.__qualname__}"
    if of.__module__.partition(".")[0] in (
        "torch",
        *sys.stdlib_module_names,
    ):  # their versions are in the key
        return name
    return name + inspect.getsource(of)  # which reads all of its file


@lru_cache(maxsize=1024)
def is_installed(module: str | None) -> bool:
    """Return whether a module comes with Python or was installed, so that it rarely changes between runs."""
    if module is None or module.partition(".")[0] == __name__.partition(".")[0]:
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return any(file.startswith(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


def global_names(code: CodeType) -> set[str]:
    """Return the names of the globals that `code` and nested code read or write."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found |= global_names(const)
    return found


def _functions_of(of: type) -> Iterator[FunctionType]:
    for value in vars(of).values():
        plain = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if isinstance(plain, FunctionType):
            yield plain


@lru_cache(maxsize=1)
def _common_to_modules() -> frozenset[str]:
    return frozenset(vars(nn.Module()))
