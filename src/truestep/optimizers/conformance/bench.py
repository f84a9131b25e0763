"""A bench: one optimizer of the class under check, over params of its own, and what can be done with it.

Params, gradients and random numbers of a bench depend on names and steps alone, so that two benches that do the same end bit for
bit alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from truestep.backends import slots as reading
from truestep.optimizers.conformance.given import Gradients, gradients
from truestep.optimizers.probe.build import Way, groups_of
from truestep.optimizers.probe.plan import Member
from truestep.optimizers.probe.quiet import seed
from truestep.state.view import SlotId
from truestep.words.names import OPTIMIZER_SLOT, group_slot

Slots: TypeAlias = dict[SlotId, Any]

PARAM: Final = "param"
BOWL: Final = 0.25  # how steep the quadratic is whose gradient a closure adds: its minimum lies at zero


class Bench:
    """One optimizer over params of its own.

    Args:
        way: How it is made and stepped.
        named: ``name -> param``; the bench keeps them.
        sparse: Hand it sparse gradients.
        groups: Into how many param groups they are put, in turn.
        settings: Over those of the subject.
    """

    def __init__(
        self,
        way: Way,
        named: Mapping[str, nn.Parameter],
        *,
        sparse: bool = False,
        groups: int = 1,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._way = way
        self._sparse = sparse
        self.params = dict(named)
        seed()
        way = replace(way, settings={**way.settings, **(settings or {})})
        if groups > 1 and way.form != "groups":
            way = replace(way, form="groups")
        members = [
            (Member(name, tuple(param.shape), (), number % groups, param.ndim), param)
            for number, (name, param) in enumerate(self.params.items())
        ]
        self.optimizers: list[Any] = way.make(members)
        self.evaluations = 0  # of closures
        self.handed: dict[str, Tensor] = {}  # the gradients as they were handed over last: copies

    def step(self, gradients: Gradients) -> Any:
        """Give the params these gradients (copies) and take one step; return what it returns."""
        seed()
        if not self._way.closure:
            self.give(gradients)
            return [optimizer.step() for optimizer in self.optimizers][0]
        return [optimizer.step(self.closure(gradients)) for optimizer in self.optimizers][0]

    def give(self, gradients: Gradients) -> None:
        """Set the gradients: copies, absent ones None."""
        self.handed = {}
        for name, param in self.params.items():
            gradient = gradients.get(name)
            if gradient is None:
                param.grad = None
            else:
                self._hand(name, param, gradient)

    def closure(self, gradients: Gradients) -> Callable[[], Tensor]:
        """Return a closure with the gradients of a line plus a bowl, so that they depend on where the params are."""

        def closure() -> Tensor:
            self.evaluations += 1
            loss = torch.zeros(())
            with torch.no_grad():
                for name, param in self.params.items():
                    gradient = gradients.get(name)
                    if gradient is None:
                        param.grad = None
                    else:
                        self._hand(name, param, gradient + BOWL * param)
                        loss = loss + (gradient * param).sum().real.float() + 0.5 * BOWL * (param.abs() ** 2).sum().float()
            return loss

        return closure

    def _hand(self, name: str, param: nn.Parameter, gradient: Tensor) -> None:
        self.handed[name] = gradient.detach().clone()
        fresh = gradient.detach().clone()  # of the same strides
        param.grad = fresh.to_sparse() if self._sparse and fresh.layout == torch.strided else fresh

    def run(self, first: int, last: int, **of: Any) -> Bench:
        """Take the steps from `first` to `last`, counted from 0, the last one not; `of` go to `gradients`."""
        for step in range(first, last):
            self.step(gradients(self.params, step, **of))
        return self

    # -- What it keeps

    @property
    def groups(self) -> list[dict[str, Any]]:
        """All param groups, live."""
        return groups_of(self.optimizers)

    def group_of(self, name: str) -> dict[str, Any]:
        """Return the live group that holds a param."""
        param = self.params[name]
        return next(group for group in self.groups if any(param is one for one in group["params"]))

    def set(self, **entries: Any) -> Bench:
        """Set entries of all groups that have them."""
        for group in self.groups:
            group.update({key: value for key, value in entries.items() if key in group})
        return self

    def values(self) -> dict[str, Tensor]:
        """Return copies of the params."""
        return {name: param.detach().clone() for name, param in self.params.items()}

    def entries(self) -> list[tuple[str, dict[str, Any]]]:
        """Return ``(param name, live state)`` of every param that has state, with the optimizer's own dicts."""
        found = []
        for optimizer in self.optimizers:
            state = optimizer.state
            found += [(name, state[param]) for name, param in self.params.items() if param in state]
        return found

    def slots(self) -> Slots:
        """Return copies of all slots; None, and objects that cannot be read, are left out."""
        labelled = reading.labelled_items(self.optimizers)
        live = [
            slot for name, param in self.params.items() for slot in reading.param_slots(name, param, labelled, reading.replica)
        ]
        for label, optimizer in labelled:
            live += [*reading.group_slots(optimizer, label), *reading.optimizer_slots(optimizer, label)]
        return {
            (slot.name, slot.key): _dense(slot.local[0]) if slot.kind == "tensor" else copy.deepcopy(slot.value)
            for slot in live
            if slot.kind == "tensor" or (slot.kind == "value" and slot.value is not None)
        }

    def state(self) -> Slots:
        """Return copies of the slots of params alone: themselves, and their state."""
        return {slot_id: value for slot_id, value in self.slots().items() if slot_id[0] in self.params}

    def count(self, slot_id: SlotId, steps: float) -> bool:
        """Set a step counter; return whether it could be found."""
        name, key = slot_id
        holders: list[dict[Any, Any]] = [entry for owner, entry in self.entries() if owner == name]
        if name.startswith(group_slot("")):
            holders = self.groups
        elif name.startswith(OPTIMIZER_SLOT):
            holders = [*(vars(optimizer) for optimizer in self.optimizers), *(optimizer.state for optimizer in self.optimizers)]
        holders = [holder for holder in holders if key in holder]
        for holder in holders:
            value = holder[key]
            holder[key] = torch.full_like(value, steps) if isinstance(value, Tensor) else type(value)(steps)
        return bool(holders)

    # -- Saving and loading

    def state_dicts(self) -> list[Any]:
        """Return the `state_dict` of each optimizer."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load(self, states: Sequence[Any]) -> Bench:
        """Load one `state_dict` into each optimizer."""
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        return self

    def put(self, values: Mapping[str, Tensor]) -> Bench:
        """Write values into the params."""
        with torch.no_grad():
            for name, value in values.items():
                self.params[name].copy_(value)
        return self


def numbered(value: Any) -> float | None:
    """Return a single number as a float; None for what is none."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _dense(tensor: Tensor) -> Tensor:
    return (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach().clone()


def dtypes(slots: Slots) -> dict[SlotId, torch.dtype]:
    """Return the dtypes of those slots that are tensors."""
    return {slot_id: value.dtype for slot_id, value in slots.items() if isinstance(value, Tensor)}
