"""Reading torch optimizers: which slots there are, by name, without creating any."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from truestep.state.view import Slot, slots_of
from truestep.words.layout import Shard
from truestep.words.names import OPTIMIZER_SLOT, clean, group_slot, labelled

Place: TypeAlias = Callable[[Tensor], tuple[Shard, tuple[Tensor, ...]]]
Labelled: TypeAlias = Sequence[tuple["str | None", torch.optim.Optimizer]]

# What an optimizer carries beside state: torch's own furniture, what schedules replace, what a GradScaler lends for one step.
_FURNITURE: Final = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))) | {
    *("step", "base_optimizer", "optimizer"),
    *("grad_scale", "found_inf"),
}
_NOT_SHOWN: Final = ("params", "param_names", "name")  # entries of a group that say what it is over


def labelled_items(things: Any) -> list[tuple[str | None, Any]]:
    """Return ``(label, item)`` of one thing, a sequence or a mapping; the label of one thing alone is None."""
    if isinstance(things, Mapping) and not isinstance(things, nn.Module):
        return [(str(label), item) for label, item in things.items()]
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
    pairs = (
        (labelled(label, clean(name)), param)
        for label, module in labelled_items(model)
        for name, param in module.named_parameters()
    )
    return first_names(pairs)


def first_names(pairs: Any) -> list[tuple[str, nn.Parameter]]:
    """Return the ``(name, param)`` pairs without those whose param has come before."""
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, param in pairs:
        first.setdefault(id(param), (name, param))
    return list(first.values())


def registered(
    roots: Sequence[tuple[str | None, nn.Module]], instead: Mapping[tuple[int, str], nn.Parameter]
) -> list[tuple[str, nn.Parameter]]:
    """Return the params of models by name, other ones where a vendor registers stand-ins while the modules run.

    Args:
        roots: ``(label, model)``.
        instead: ``(id(module), own name) -> param`` to be taken in place of what the module shows now.
    """
    return first_names(
        (labelled(label, clean(f"{prefix}.{own}" if prefix else own)), param)
        for label, root in roots
        for prefix, module in root.named_modules()
        for own, shown in module._parameters.items()
        if (param := instead.get((id(module), own), shown)) is not None
    )


def trainable(params: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Return those that require a gradient: what a recipe's `optimizer` is given."""
    return [(name, param) for name, param in params if param.requires_grad]


def replica(tensor: Tensor) -> tuple[Shard, tuple[Tensor, ...]]:
    """Place a plain tensor: the whole of it is here."""
    return Shard.replica(tuple(tensor.shape)), (tensor.detach(),)


def param_slots(name: str, param: Tensor, optimizers: Labelled, place: Place) -> Iterator[Slot]:
    """Yield the slots of one param: itself, and what each optimizer keeps for it.

    Of a param that several optimizers hold, a key that is taken gets the optimizer's label before it: the view shows both.
    """
    yield from slots_of(name, "param", param, place)
    taken = {"param"}
    for label, optimizer in optimizers:
        if param in optimizer.state:  # `in` first: optimizer.state is a defaultdict, and reading adds an entry
            for key, value in optimizer.state[param].items():
                free = f"{label or 'state'}/{key}" if str(key) in taken else str(key)
                taken.add(free)
                yield from slots_of(name, free, value, place)


def group_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return what the param groups are called: their ``name``, or where that does not tell them apart, their index."""
    names = [str(group.get("name", index)) for index, group in enumerate(optimizer.param_groups)]
    return names if len(set(names)) == len(names) else [str(index) for index in range(len(names))]


def group_slots(optimizer: torch.optim.Optimizer, label: str | None, place: Place = replica) -> Iterator[Slot]:
    """Yield the entries of every param group but its params."""
    for name, group in zip(group_names(optimizer), optimizer.param_groups, strict=True):
        for key, value in group.items():
            if key not in _NOT_SHOWN:
                yield from slots_of(group_slot(labelled(label, name)), str(key), value, place)


def optimizer_slots(optimizer: torch.optim.Optimizer, label: str | None, place: Place = replica) -> Iterator[Slot]:
    """Yield what the optimizer object keeps for itself: attributes made of tensors and numbers, and state under no param."""
    name = OPTIMIZER_SLOT if label is None else f"{OPTIMIZER_SLOT}/{label}"
    kept = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _FURNITURE and not key.startswith("_") and value is not None and _is_state(value)
    }
    for key, value in kept.items():
        yield from slots_of(name, key, value, place)
    for owner, value in optimizer.state.items():
        if not isinstance(owner, Tensor):
            yield from slots_of(name, f"state/{owner}" if str(owner) in kept else str(owner), value, place)


def _is_state(value: Any) -> bool:
    """Tell whether a value is made of tensors and numbers; a container of the params themselves is none."""
    if isinstance(value, Mapping):
        return all(map(_is_state, value.values()))
    if isinstance(value, (list, tuple, deque)):
        return all(map(_is_state, value))
    return value is None or isinstance(value, (int, float, complex, Tensor)) and not isinstance(value, nn.Parameter)


def orphans(optimizers: Sequence[torch.optim.Optimizer], live: Sequence[Tensor]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the state that is keyed by tensors which are no live params, as ``(shape and dtype, keys)``."""
    alive = {id(param) for param in live}
    return [
        (f"{tuple(key.shape)} {key.dtype}", tuple(str(part) for part in entry))
        for optimizer in optimizers
        for key, entry in optimizer.state.items()
        if isinstance(key, Tensor) and id(key) not in alive
    ]
