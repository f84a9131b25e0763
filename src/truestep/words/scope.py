"""How far one element's update looks, and the traits that decide where an optimizer may run."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Scope(enum.Enum):
    """How far the update of one element looks, per ndim of the param; `width` orders them."""

    ELEMENT = "element"  # Adam, Adagrad: each element alone
    ROW = "row"  # all elements of one row of the param
    COLUMN = "column"  # all elements of one column
    TENSOR = "tensor"  # Adafactor, Muon, LAMB, Shampoo: the whole param
    GROUP = "group"  # a scalar shared by a param group
    MODEL = "model"  # Prodigy, L-BFGS: a scalar or vector over all params

    @property
    def width(self) -> int:
        """Position from narrow to wide; row and column are equally wide and do not contain each other."""
        return _WIDTH[self]


_WIDTH = {Scope.ELEMENT: 0, Scope.ROW: 1, Scope.COLUMN: 1, Scope.TENSOR: 2, Scope.GROUP: 3, Scope.MODEL: 4}


def widest(scopes: list[Scope]) -> Scope:
    """Return the narrowest scope that contains them all; row and column together are ``tensor``."""
    if not scopes:
        return Scope.ELEMENT
    if {Scope.ROW, Scope.COLUMN} <= set(scopes) and max(scope.width for scope in scopes) < Scope.TENSOR.width:
        return Scope.TENSOR
    return max(scopes, key=lambda scope: scope.width)


@dataclass(frozen=True, slots=True)
class Traits:
    """What else decides where an optimizer may run.

    Attributes:
        draws: It draws random numbers.
        shape_sensitive: A reshape of the param changes the update.
        none_sensitive: An absent gradient is not a zero one.
        needs: What it must be given: ``closure``, ``names``, ``2d``.
    """

    draws: bool = False
    shape_sensitive: bool = False
    none_sensitive: bool = False
    needs: tuple[str, ...] = ()
