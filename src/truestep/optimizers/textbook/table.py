"""The table of rules, and which of torch's classes each is the rule of."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch.optim import Optimizer

from truestep.optimizers.textbook import adam, adaptive, descent, whole
from truestep.optimizers.textbook.definition import Rule
from truestep.words.errors import TrueStepError

_ALL: Final = (
    descent.SGD,
    adaptive.ADAGRAD,
    adaptive.RMSPROP,
    adaptive.ADADELTA,
    adam.ADAM,
    adam.ADAMW,
    adam.ADAMAX,
    adam.NADAM,
    adam.RADAM,
    descent.ASGD,
    descent.RPROP,
    descent.LION,
    whole.ADAFACTOR,
    whole.MUON,
    whole.LAMB,
)
RULES: Final[Mapping[str, Rule]] = MappingProxyType({rule.name: rule for rule in _ALL})
_CLASSES: Final[Mapping[type[Optimizer], Rule]] = {
    getattr(torch.optim, name): RULES[name.lower()] for name in torch.optim.__all__ if name.lower() in RULES
}


def references() -> list[str]:
    """Return the names of the textbook's rules, in alphabetical order.

    >>> references()[:4]
    ['adadelta', 'adafactor', 'adagrad', 'adam']
    """
    return sorted(RULES)


def rule(name: str) -> Rule:
    """Return a rule by its name, in any case.

    Raises:
        TrueStepError: If the textbook has none of that name.
    """
    if name.lower() not in RULES:
        raise TrueStepError(f"expected a rule of the textbook, found {name!r}. Choose one of {', '.join(references())}.")
    return RULES[name.lower()]


def rule_of(optimizer: Optimizer | type[Optimizer]) -> Rule | None:
    """Return the rule of an optimizer of `torch.optim`, or of a replica of one; None where the textbook has none.

    A subclass of one's own is another optimizer, whatever it inherits. An optimizer inside a wrapper is the caller's to take out.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if cls in _CLASSES:
        return _CLASSES[cls]
    base = cls.__base__
    is_replica = base is not None and (cls.__module__, cls.__qualname__) == (base.__module__, base.__qualname__)
    return _CLASSES.get(base) if is_replica and base is not None else None
