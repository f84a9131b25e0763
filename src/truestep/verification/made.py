"""What a recipe's pieces made: refused in one message where it cannot be verified, told of where processes differ."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from truestep.backends import slots
from truestep.state import digest
from truestep.verification.recipe import MakeOptimizer, Recipe
from truestep.words.errors import UnsupportedError, VerifyError
from truestep.words.finding import Finding, listed
from truestep.words.layout import Shard

Prints: TypeAlias = Mapping[str, tuple[str, str]]  # name of a param -> its dtype and shape in words, its content's digest


def model_of(recipe: Recipe) -> Any:
    """Return what the recipe's `model` makes: a module with something to train, or several.

    Raises:
        VerifyError: If it is anything else.
    """
    model = recipe.model()
    items = [item for _, item in slots.labelled_items(model)]
    if not items or not all(isinstance(item, nn.Module) for item in items):
        found = listed(dict.fromkeys(type(item).__name__ for item in items)) or "nothing"
        raise VerifyError(f"recipe {recipe.name!r}: expected model() to return a torch module, or several; found {found}.")
    if not slots.trainable(slots.named_params(model)):
        raise VerifyError(f"recipe {recipe.name!r}: expected a model with params to train, found none that requires a gradient.")
    return model


def loss_of(recipe: Recipe, model: Any, batch: Any) -> Tensor:
    """Return the recipe's loss of a batch.

    Raises:
        VerifyError: If it is no tensor of one element that depends on the model's params.
    """
    loss: Any = recipe.loss(model, batch)
    if not isinstance(loss, Tensor):
        found = f"a {type(loss).__name__}. Return the tensor itself, without .item()"
    elif loss.numel() != 1:
        found = f"one of shape {tuple(loss.shape)}. Return its mean or its sum"
    elif not loss.requires_grad:
        found = "one that no gradient flows through. Leave out detach() and no_grad(), and use the model that is passed in"
    else:
        return loss
    raise VerifyError(f"recipe {recipe.name!r}: expected loss(model, batch) to return a tensor of one element, found {found}.")


def optimizer_maker(recipe: Recipe, named: str | None) -> MakeOptimizer:
    """Return ``named_params -> optimizer``: the one of this name, or the recipe's own, with a look at what it makes.

    Raises:
        VerifyError: When it is called, if it makes no optimizer.
    """
    make = recipe.optimizer_named(named)

    def checked(named_params: Any) -> Any:
        optimizer = make(named_params)
        items = [item for _, item in slots.labelled_items(optimizer)]
        if not items or not all(hasattr(item, "step") and hasattr(item, "param_groups") for item in items):
            found = listed(dict.fromkeys(type(item).__name__ for item in items)) or "nothing"
            expected = f"recipe {recipe.name!r}: expected optimizer(named_params) to return an optimizer, or several"
            raise VerifyError(f"{expected}; found {found}.")
        return optimizer

    return checked


def need_no_closure(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers whose step calls the model again.

    Raises:
        UnsupportedError: If one needs a closure.
    """
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UnsupportedError(
                f"expected an optimizer that steps by itself, found {type(optimizer).__name__}, whose step needs a closure and "
                "runs the model several times. Choose another with --optimizer."
            )


def prints_of(model: Any) -> dict[str, tuple[str, str]]:
    """Return of each param what tells whether another process made the same: dtype and shape in words, and a digest."""
    return {name: (f"{param.dtype}{list(param.shape)}", _print_of(param)) for name, param in slots.named_params(model)}


def _print_of(param: nn.Parameter) -> str:
    if type(param) is not nn.Parameter or param.is_meta:
        return ""  # of another kind, or without content yet: for the backend to make
    shape = tuple(param.shape)
    lanes = [digest.lanes(param.detach(), box, shape) for box in Shard.replica(shape).boxes]
    return digest.digest(str(param.dtype), shape, digest.total(lanes))


def need_one_model(by_rank: Sequence[Prints]) -> None:
    """Refuse models that are not of one form.

    Raises:
        VerifyError: If the ranks' params differ in name, dtype or shape.
    """
    first = {name: form for name, (form, _) in by_rank[0].items()}
    for rank, prints in enumerate(by_rank):
        forms = {name: form for name, (form, _) in prints.items()}
        if forms != first:
            name = next(name for name in {**first, **forms} if first.get(name) != forms.get(name))
            raise VerifyError(
                f"expected model() to return the same model on every rank, found that {name} is {forms.get(name, 'absent')} on "
                f"rank {rank} and {first.get(name, 'absent')} on rank 0. Build it without regard to the rank."
            )


def differing_models(reference: Prints, by_rank: Sequence[Prints]) -> list[Finding]:
    """Return the warning that `model()` did not make the same values everywhere, if so.

    Args:
        reference: What one process made.
        by_rank: What the ranks made.
    """
    apart = {
        rank: [name for name, print_ in prints.items() if print_ != reference.get(name)] for rank, prints in enumerate(by_rank)
    }
    names = dict.fromkeys(name for names in apart.values() for name in names)
    if not names:
        return []
    finding = Finding(
        "verify/model-differs",
        None,
        "warning",
        param=next(iter(names)),
        expected="model() to make the same values on every call, as torch is seeded before it",
        found=f"other values of {listed(names)} than in one process",
        fix="Seed what draws them inside model(), or load them there: what a run starts from then depends on the backend.",
        ranks=tuple(rank for rank, names in apart.items() if names),
    )
    return [finding]
