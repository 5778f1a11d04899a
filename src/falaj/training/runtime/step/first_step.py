"""Errors of the first step that name the layer, or the loss, and the shapes that it was given."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.distributed import DistError

from falaj.training.runtime.data.sources import Batch
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.step.calling import BatchCall
from falaj.training.runtime.step.out_of_memory import first_line

MAX_LAYER_TEXT = 120
MAX_ITEMS = 12
WRAPPERS = ("_call_impl", "_wrapped_call_impl")
"""Functions of torch that call `forward`: their `args` are what the layer was given."""


@contextmanager
def errors_for_broadcast_targets() -> Iterator[None]:
    """Let torch raise what it only warns of: losses of every output with every target, [8, 1] against [8]."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")
        yield


def explain_failure(failure: Exception, model: nn.Module, batch: Batch) -> Exception:
    """Return an error that names where the step over `batch` failed; errors of the caller's own types get a note.

    The failure of another process is returned as it is: it is not due to this model.
    """
    if isinstance(failure, DistError) or "gloo" in str(failure):
        return failure
    where, fault = failed_place(failure, model)
    faults = [fault, TrainingFault("batch", describe(batch))]
    explained = InvalidTraining(f"{first_line(failure)} (in {where}, at the first step)", faults=faults)
    if type(failure).__module__.partition(".")[0] in ("builtins", "torch"):
        return explained
    failure.add_note(str(explained))
    return failure


def failed_place(failure: Exception, model: nn.Module) -> tuple[str, TrainingFault]:
    """Return the layer, the loss or the pass that raised `failure`, and what it was given."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(failure.__traceback__)]
    for frame in reversed(frames):
        held = frame.f_locals.get("self")
        if isinstance(held, nn.Module) and id(held) in names:
            name = names[id(held)]
            where = f"the layer {name}" if name else "the model"
            fault = TrainingFault(name or "model", given_to(frame), layer_text(held), fix_of(held, frame))
            return where, fault
        if frame.f_code is BatchCall.__call__.__code__:
            return called_place(frame)
    return "the backward pass", TrainingFault("model", "a loss whose gradients cannot be computed")


def called_place(frame: FrameType) -> tuple[str, TrainingFault]:
    """Return the place of a failure outside of all layers: the call of the model, or the loss."""
    values = frame.f_locals
    if "output" not in values:
        return "the model", TrainingFault("model", describe(values.get("inputs", ())), "its inputs")
    target = values.get("target")
    given = f"output {describe(values['output'])}, target {describe(target)}"
    fix = None
    output = values["output"]
    if isinstance(output, Tensor) and isinstance(target, Tensor):
        if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
            fix = "a target of the output's shape: target.unsqueeze(1)"
        elif target.is_floating_point() != output.is_floating_point() or target.dtype != output.dtype:
            fix = "classes as int64: target.long(); numbers as float32: target.float()"
    return "the loss", TrainingFault("loss", given, "shapes and types that the loss accepts", fix)


def given_to(frame: FrameType) -> str:
    """Return the shapes of the arguments of a call of a layer."""
    values, code = frame.f_locals, frame.f_code
    if code.co_name in WRAPPERS:
        args = describe(values.get("args", ()))
        return args if not values.get("kwargs") else f"{args}, {describe(values['kwargs'])}"
    count = code.co_argcount + code.co_kwonlyargcount
    given = {name: values[name] for name in code.co_varnames[1:count] if name in values}
    return ", ".join(f"{name}: {describe(value)}" for name, value in given.items()) or "no arguments"


def layer_text(layer: nn.Module) -> str:
    text = (
        f"{type(layer).__name__}({layer.extra_repr()})" if not any(layer.children()) else type(layer).__name__
    )
    return text if len(text) <= MAX_LAYER_TEXT else f"{text[: MAX_LAYER_TEXT - 1]}…"


def fix_of(layer: nn.Module, frame: FrameType) -> str | None:
    """Return the fix of a layer that was given other columns, or another type, than it has weights for."""
    given = next((value for value in frame.f_locals.values() if isinstance(value, Tensor)), None)
    weight = getattr(layer, "weight", None)
    if given is None or not isinstance(weight, Tensor):
        return None
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if given.is_floating_point():
            return "whole numbers as input, such as int64"
        if given.device.type != "cpu" or not given.numel():  # a GPU cannot be asked after such an error
            return None
        if int(given.max()) >= layer.num_embeddings:
            return f"num_embeddings of more than {int(given.max())}, the largest number in the input"
        return None
    if isinstance(layer, nn.Linear) and given.dim() and given.shape[-1] != layer.in_features:
        return f"in_features={given.shape[-1]}, or inputs with {layer.in_features} columns"
    if given.dtype != weight.dtype:
        return f"inputs of {type_text(weight)}, the type of the weights, instead of {type_text(given)}"
    return None


def describe(value: Any) -> str:
    """Return the types and shapes of a batch in one line."""
    if isinstance(value, Tensor):
        return f"{type_text(value)} {list(value.shape)}"
    if isinstance(value, Mapping):
        shown = [f"{name}: {describe(each)}" for name, each in list(value.items())[:MAX_ITEMS]]
        return f"{{{', '.join(shown)}{', …' if len(value) > MAX_ITEMS else ''}}}"
    if isinstance(value, tuple | list):
        shown = [describe(each) for each in value[:MAX_ITEMS]]
        return f"({', '.join(shown)}{', …' if len(value) > MAX_ITEMS else ''})"
    return "None" if value is None else type(value).__name__


def type_text(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
