"""How a batch becomes a loss: the inputs of the model, its call, and the loss of its output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from falaj.training.runtime.data.sources import Batch
from falaj.training.runtime.errors import InvalidTraining, TrainingFault

Loss: TypeAlias = Callable[[Any, Any], Tensor] | Callable[[Any], Tensor] | None
"""loss(output, target), or loss(output) -> a scalar: the mean over the samples of a batch. None: the output has it."""

LossForm = Literal["pair", "output", "own"]


class BatchCall:
    """Computes the loss of a batch: loss(model(inputs…), target).

    A tuple is (inputs…, target). A dict is passed as keywords if `forward` has parameters of these names, as models of
    Hugging Face do; any other batch is passed whole to the model and to the loss. A loss without a target leaves all of
    the batch to the model: it is a function of the output alone, or None, where the output has the loss.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._loss, self._form = loss, loss_form(loss)
        self._required, self._names = keyword_names(model)

    def __call__(self, run: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the loss of `batch` by `run`: the model, or a function that calls it."""
        inputs, target = self.split(batch)
        if len(inputs) == 1 and isinstance(inputs[0], Mapping) and self._takes(inputs[0]):
            output = run(**inputs[0])
        else:
            output = run(*inputs)
        return self.loss_of(output, target)

    def split(self, batch: Batch) -> tuple[tuple[Any, ...], Any]:
        """Return the inputs of the model, and the target of the loss."""
        if not isinstance(batch, tuple):
            return (batch,), batch
        return (batch[:-1], batch[-1]) if self._form == "pair" else (batch, None)

    def loss_of(self, output: Any, target: Any) -> Tensor:
        """Return the loss of an output of the model."""
        loss: Any = self._loss
        if self._form == "pair":
            found: Tensor = loss(output, target)
        else:
            found = own_loss(output) if self._form == "own" else loss(output)
        return found

    def _takes(self, named: Mapping[str, Any]) -> bool:
        """Return whether `forward` can be called with these keywords."""
        if any(name not in named for name in self._required):
            return False
        if self._names is None:
            return all(isinstance(name, str) for name in named)
        return all(name in self._names for name in named)


def loss_form(loss: Loss) -> LossForm:
    """Return whether `loss` takes output and target, the output alone, or is the model's own."""
    if loss is None:
        return "own"
    return "output" if accepts(loss, 1) and not accepts(loss, 2) else "pair"


def accepts(function: Callable[..., Any], count: int) -> bool:
    """Return whether `function` can be called with `count` arguments; True where its signature is unknown."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        inspect.signature(called).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def keyword_names(model: nn.Module) -> tuple[tuple[str, ...], frozenset[str] | None]:
    """Return the names of the required and of all parameters of `forward`; None for all if it takes any keyword."""
    forward = getattr(model, "_orig_mod", model).forward  # of a model that the caller has compiled
    try:
        every = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return (), frozenset()
    named = [each for each in every if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    positional = [each.name for each in every if each.kind is each.POSITIONAL_ONLY]
    required = [each.name for each in named if each.default is each.empty]
    is_open = any(each.kind is each.VAR_KEYWORD for each in every)
    return (*positional, *required), None if is_open else frozenset(each.name for each in named)


def own_loss(output: Any) -> Tensor:
    """Return the loss in the output of a model: its `loss`, or the only number in it. Raise InvalidTraining without."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, Tensor):
        found = output
    if found is None and isinstance(output, tuple | list):
        numbers = [each for each in output if isinstance(each, Tensor) and not each.dim()]
        found = numbers[0] if len(numbers) == 1 else None
    if isinstance(found, Tensor):
        return found
    named = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
    fault = TrainingFault(
        "loss",
        f"None, and the model returns a {type(output).__name__}{named}",
        "an output with a `loss`, as a Hugging Face model has if its batch has labels",
        "loss=torch.nn.functional.cross_entropy, or a function of the output",
    )
    raise InvalidTraining("the model computes no loss", faults=[fault])
