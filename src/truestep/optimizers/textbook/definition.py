"""What a rule of the textbook is, and the lines that many rules begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from truestep.optimizers.textbook.operand import Operand, Quantity
from truestep.words.errors import TrueStepError
from truestep.words.scope import Scope

Hyper: TypeAlias = Mapping[str, Any]
State: TypeAlias = Mapping[str, Quantity]
NewState: TypeAlias = dict[str, Quantity]


@dataclass(frozen=True)
class Rule:
    """One update rule, in the symbols of its source.

    Attributes:
        name: As `rule` takes it: ``adamw``.
        source: Paper and place, and the upstream file where that decides what the paper leaves open.
        scope: How far the update of one element looks.
        roundings: On the longest path through the kernels that are known (plain, foreach, fused), counted by hand beside the
            rule; reductions come on top. What `Operand` counts, and the bound uses, is never less: a test holds it.
        defaults: Hyper-parameters by the names torch has for them, with torch's defaults.
        init: ``(param, hyper) -> state`` before the first step: numbers and float64 tensors by torch's keys.
        step: ``(param, grad, state, hyper, t) -> (param, state)``, the t-th step, from 1. Pure. On float64 tensors it gives the
            value, on `Operand` (`t` too) the value and its bound.
    """

    name: str
    source: str
    scope: Scope
    roundings: int
    defaults: Mapping[str, Any]
    init: Callable[[Tensor, Hyper], NewState] = field(repr=False)
    step: Callable[[Quantity, Quantity, State, Hyper, Quantity], tuple[Quantity, NewState]] = field(repr=False)

    def hyper(self, **given: Any) -> dict[str, Any]:
        """Return the defaults with what is given in their place.

        Raises:
            TrueStepError: If the rule has no such hyper-parameter.
        """
        if unknown := sorted(set(given) - set(self.defaults)):
            raise TrueStepError(
                f"expected hyper-parameters of {self.name} ({', '.join(self.defaults)}), found {', '.join(unknown)}. "
                "Leave them out, or choose another rule."
            )
        return {**self.defaults, **given}


def slope(theta: Quantity, grad: Quantity, hyper: Hyper) -> Quantity:
    """Return g, down which the rule goes: turned round to maximize, with coupled weight decay added.

    On kernels: weight_decay is cast, multiplied and added, 3 roundings.
    """
    g = -grad if hyper["maximize"] else grad
    if hyper["weight_decay"] and not hyper.get("decoupled_weight_decay", False):
        g = g + hyper["weight_decay"] * theta
    return g


def decayed(theta: Quantity, hyper: Hyper) -> Quantity:
    """Return the param after decoupled weight decay, theta - lr lambda theta, where there is any.

    (I. Loshchilov, F. Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2, line 12.) Written as a sum, it also
    covers kernels that multiply by 1 - lr lambda; where lr is in a tensor, they make that number in the tensor's dtype.
    """
    if not hyper["weight_decay"] or not hyper.get("decoupled_weight_decay", True):
        return theta
    rate = hyper["lr"] * hyper["weight_decay"]
    return theta * (1 - rate) if isinstance(rate, Operand) else theta - rate * theta
