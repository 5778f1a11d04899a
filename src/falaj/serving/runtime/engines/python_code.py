"""Models that are Python source: pre- and post-processing, or a model of one's own, in the sandbox of user code.

    def load(files):            # optional: called once, with the bytes of the version's other files by path
    def predict(inputs):        # arrays by name in, arrays by name out, as the registered signature says

or a class `Model` whose constructor may take `files`, with a method `predict`.
"""

from __future__ import annotations

import inspect
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from falaj.errors import InvalidInput, Unavailable, shorten
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.tensors import Datatype, Tensor
from falaj.serving.runtime.engines.opened import ModelContents, OpenedModel, Run
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]
Predict = Callable[[dict[str, Array]], Any]

PLATFORM = "python"
SOURCE = "model.py"


def open_model(file: ServedFile, contents: ModelContents) -> OpenedModel:
    """Run the source, and what loads the model. Runs take turns unless the endpoint says how many may run at a time."""
    name = f"{file.model}@{file.version}"
    module = ModuleType("model")
    try:
        exec(compile(contents.model, SOURCE, "exec"), module.__dict__)  # noqa: S102 - in the sandbox of user code
        predict = _loaded(module, MappingProxyType(dict(contents.others)))
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"{name} imports {error.name}, which is not installed: install it beside Falaj, or bring what it needs "
            "among the files of the version"
        ) from None
    except MemoryError:
        raise
    except BaseException as error:  # sys.exit() of a model ends nothing but its loading
        raise InvalidInput(f"{name} cannot be loaded: {_words(error)}") from None
    if predict is None:
        raise InvalidInput(
            f"{name} defines neither a function predict(inputs) nor a class Model with that method"
        )
    turns = nullcontext() if (file.settings.instances or 1) > 1 else threading.Lock()
    return OpenedModel(PLATFORM, file.inputs, file.outputs, _runner(predict, file, turns))


def _loaded(module: ModuleType, files: Mapping[str, bytes]) -> Predict | None:
    made = getattr(module, "Model", None)
    if inspect.isclass(made) and callable(getattr(made, "predict", None)):
        found: Predict = _call(made, files).predict
        return found
    load, predict = getattr(module, "load", None), getattr(module, "predict", None)
    if not callable(predict):
        return None
    if callable(load):
        _call(load, files)
    found = predict
    return found


def _call(function: Any, files: Mapping[str, bytes]) -> Any:
    """Call a function with the files, if it takes an argument."""
    return function(files) if inspect.signature(function).parameters else function()


def _runner(predict: Predict, file: ServedFile, turns: Any) -> Run:
    names = [tensor.name for tensor in file.inputs]
    name = f"{file.model}@{file.version}"

    def run(inputs: Sequence[Array]) -> list[Array]:
        with turns:
            try:
                found = predict(dict(zip(names, inputs, strict=True)))
            except MemoryError:
                raise
            except BaseException as error:  # also SystemExit: the thread has to go on and answer
                raise RuntimeError(_words(error)) from None
        return _arrays(name, found, file.outputs)

    return run


def _arrays(name: str, found: Any, outputs: Sequence[Tensor]) -> list[Array]:
    """Return the arrays of the declared outputs, in their order and types."""
    wanted = [tensor.name for tensor in outputs]
    if not isinstance(found, Mapping) or set(found) != set(wanted):
        given = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        raise InvalidInput(
            f"predict of {name} returned {shorten(given)}; allowed a dict with {', '.join(wanted)}"
        )
    return [_array(name, tensor, found[tensor.name]) for tensor in outputs]


def _array(name: str, tensor: Tensor, value: Any) -> Array:
    array = np.asarray(value)
    if tensor.datatype is Datatype.BYTES:
        return array.astype(object)
    wanted = NUMPY[tensor.datatype]
    if not np.can_cast(array.dtype, wanted, "same_kind"):
        raise InvalidInput(
            f"predict of {name} returned {tensor.name} with the type {array.dtype} where it declares {tensor.datatype}"
        )
    return np.ascontiguousarray(array, wanted)


def _words(error: BaseException) -> str:
    """Return what happened, and the line of the source where it did."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == SOURCE]
    at = f" ({SOURCE}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {shorten(str(error), limit=300)}{at}"
