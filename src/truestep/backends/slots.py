"""Reading torch optimizers: which slots there are, by name, without creating any."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from truestep.state.view import Slot, slots_of
from truestep.words.layout import Shard
from truestep.words.names import OPTIMIZER_SLOT, clean, group_slot, labelled

Place: TypeAlias = Callable[[Tensor], tuple[Shard, tuple[Tensor, ...]]]

# What every torch optimizer carries in its __dict__ beside state.
_FURNITURE: Final = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))) | {"step", "base_optimizer", "optimizer"}


def labelled_items(things: Any) -> list[tuple[str | None, Any]]:
    """Return ``(label, item)`` of one thing, a sequence or a mapping; the label of one thing alone is None."""
    if isinstance(things, Mapping) and not isinstance(things, nn.Module):
        return list(things.items())
    if isinstance(things, (list, tuple)):
        return [(None, things[0])] if len(things) == 1 else [(str(index), item) for index, item in enumerate(things)]
    return [(None, things)]


def like(things: Any, items: Sequence[Any]) -> Any:
    """Return `items` in the form that `things` has: one, a list or a mapping."""
    if isinstance(things, Mapping) and not isinstance(things, nn.Module):
        return dict(zip(things, items, strict=True))
    return list(items) if isinstance(things, (list, tuple)) else items[0]


def named_params(model: Any) -> list[tuple[str, nn.Parameter]]:
    """Return the params of a plain model, or of several, by name; of tied params the first name."""
    found, seen = [], set()
    for label, module in labelled_items(model):
        for name, param in module.named_parameters():
            if id(param) not in seen:
                seen.add(id(param))
                found.append((labelled(label, clean(name)), param))
    return found


def trainable(params: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Return those that require a gradient: what a recipe's `optimizer` is given."""
    return [(name, param) for name, param in params if param.requires_grad]


def replica(tensor: Tensor) -> tuple[Shard, tuple[Tensor, ...]]:
    """Place a plain tensor: the whole of it is here."""
    return Shard.replica(tuple(tensor.shape)), (tensor.detach(),)


def param_slots(name: str, param: Tensor, optimizers: Sequence[torch.optim.Optimizer], place: Place) -> Iterator[Slot]:
    """Yield the slots of one param: itself, and what each optimizer keeps for it."""
    yield from slots_of(name, "param", param, place)
    for optimizer in optimizers:
        if param in optimizer.state:  # `in` first: optimizer.state is a defaultdict, and reading adds an entry
            for key, value in optimizer.state[param].items():
                yield from slots_of(name, str(key), value, place)


def group_slots(optimizer: torch.optim.Optimizer, label: str | None) -> Iterator[Slot]:
    """Yield the entries of every param group but its params."""
    for index, group in enumerate(optimizer.param_groups):
        name = group_slot(labelled(label, str(group.get("name", index))))
        for key, value in group.items():
            if key not in ("params", "param_names", "name"):
                yield from slots_of(name, str(key), value, replica)


def optimizer_slots(optimizer: torch.optim.Optimizer, label: str | None) -> Iterator[Slot]:
    """Yield what the optimizer object keeps for itself: attributes that are tensors or numbers, and state under no param."""
    name = labelled(label, OPTIMIZER_SLOT) if label is None else f"{OPTIMIZER_SLOT}/{label}"
    for key, value in vars(optimizer).items():
        if key not in _FURNITURE and not key.startswith("_") and isinstance(value, (Tensor, int, float)):
            yield from slots_of(name, key, value, replica)
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            yield from slots_of(name, str(key), value, replica)


def orphans(optimizers: Sequence[torch.optim.Optimizer], live: Sequence[Tensor]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the state that is keyed by tensors which are no live params, as ``(shape and dtype, keys)``."""
    alive = {id(param) for param in live}
    return [
        (f"{tuple(key.shape)} {key.dtype}", tuple(str(part) for part in entry))
        for optimizer in optimizers
        for key, entry in optimizer.state.items()
        if isinstance(key, Tensor) and id(key) not in alive
    ]
