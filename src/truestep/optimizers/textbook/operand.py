"""Numbers that know how wrong they may be: the arithmetic that turns an update rule into its operand bound.

A rule is written once, in +, -, *, / and the functions below. On float64 tensors and Python numbers it gives the value; on
`Operand` it gives value and bound.

Note: what an operand claims
    Whatever computes x in floating point of unit roundoff u, by the same formula with its sums and products in any order, finds

        abs(x_found - x)  <=  gamma_k(u) m,        gamma_k(u) = k u / (1 - k u)

    with k the `roundings` on the longest path to x and m its `magnitude`, at least abs(x). By induction over the operations
    (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1 and section 3.4):

        x + y       m = m_x + m_y                       k = max(k_x, k_y) + 1
        x y         m = max(m_x abs(y), abs(x) m_y) + min(gamma_k_x, gamma_k_y) m_x m_y,      k = k_x + k_y + 1
        x / y       x times 1 / y, for which            m = m_y / (abs(y) (abs(y) - gamma_k m_y)), unbounded where negative
        f(x)        m = max(abs(f(x)), what f can move over x +- gamma_k m, divided by gamma_k)
        max(x, y)   m of the larger if it is so for certain, else the larger m; no rounding
        by sign     where x lies within its own bound of zero any branch is right: m also holds their spread over gamma_k

    So where a sum cancels, m stays what it was, and carries the error to all that is made of the sum. Constants (a learning rate,
    1 - beta) are rounded once by the cast to the kernel's dtype, k = 1. A product or quotient that underflows errs by up to
    half the smallest subnormal, which is u times the smallest normal number: that is added to its m.

    u here is the kernel's plus float64's own: the textbook's value is itself computed. Scalars have an arithmetic of their own
    (Python's float64, or a 0-d tensor's); when they meet a tensor they are rounded to its, and bring their bound along.

Note: reductions
    A sum of n terms passes n - 1 additions. Where n u > 1/8 that bound says nothing, and 8 sqrt(n) takes its place, which
    independent errors exceed with a probability below 3e-14 (see `proof.bounds`). 16-bit kernels add up in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from truestep.proof.bounds import DEVIATIONS, gamma, says_nothing, unit_roundoff

Quantity: TypeAlias = Any  # a Python number, a float64 tensor, or an Operand

_U32: Final = 2.0**-24
_U64: Final = 2.0**-53


@dataclass(frozen=True)
class Arithmetic:
    """The floating point that something is computed in.

    Attributes:
        u: Unit roundoff, float64's own added.
        normal: Smallest normal number.
        scalar: Of the numbers beside the tensors (the step, a learning rate in a tensor, Python's own), which a kernel casts to
            its own arithmetic when they meet.
    """

    u: float
    normal: float
    scalar: bool = False

    @classmethod
    def of(cls, dtype: torch.dtype, *, scalar: bool = False) -> Arithmetic:
        """Return that of a dtype."""
        return cls(unit_roundoff(dtype) + _U64, float(torch.finfo(dtype).smallest_normal), scalar)

    def relative(self, roundings: int) -> float:
        """Return the relative error of that many roundings, gamma_k(u)."""
        return gamma(roundings, self.u)

    def exact(self, value: Tensor | float) -> Operand:
        """Return what is given, as it is: a param, a gradient, old state, the number of the step."""
        tensor = torch.as_tensor(value, dtype=torch.float64)
        return Operand(tensor, tensor.abs(), 0, self)

    def constant(self, value: float) -> Operand:
        """Return a Python number, which the kernel rounds to its dtype; 0 and 1 are exact."""
        tensor = torch.tensor(float(value), dtype=torch.float64)
        if abs(value) in (0, 1):
            return Operand(tensor, tensor.abs(), 0, self)
        return Operand(tensor, tensor.abs() + self.normal, 1, self)

    def cast(self, x: Operand) -> Operand:
        """Return what was computed in another arithmetic, rounded to this one."""
        magnitude = x.value.abs() + self.normal + x.bound * ((1 + self.u) / self.u)
        return Operand(x.value, magnitude, 1, self)

    def additions(self, n: int) -> int:
        """Return how many roundings a sum of `n` terms counts as; see the note on reductions."""
        accumulate = min(self.u, _U32)
        passed = math.ceil(DEVIATIONS * math.sqrt(n)) + 1 if says_nothing(n, accumulate) else n
        return math.ceil(passed * accumulate / self.u) + 1


@dataclass(frozen=True, eq=False)
class Operand:
    """A number with the bound of its error; see the note at the top of the module.

    Attributes:
        value: float64, any shape: what it is in exact arithmetic, nearly.
        magnitude: float64, of the same shape or one that broadcasts: its rule run on absolute values.
        roundings: On the longest path to it.
        arithmetic: In which the one to be judged is computed.
    """

    value: Tensor
    magnitude: Tensor
    roundings: int
    arithmetic: Arithmetic

    @property
    def bound(self) -> Tensor:
        """How far a computed one may lie from `value`; float64, infinite where nothing can be said."""
        relative = self.arithmetic.relative(self.roundings)
        bound = torch.where(self.magnitude == 0, self.magnitude, self.magnitude * relative)
        return bound.nan_to_num(nan=math.inf, posinf=math.inf)

    def _made(self, value: Tensor, magnitude: Tensor, roundings: int) -> Operand:
        return Operand(value, magnitude, roundings, self.arithmetic)

    def _with_underflow(self, magnitude: Tensor) -> Tensor:
        """Return the magnitude of a product: what is exactly zero cannot underflow."""
        return torch.where(magnitude == 0, magnitude, magnitude + self.arithmetic.normal)

    def _product(self, value: Tensor, y: Operand) -> Operand:
        """Return x times y, whose value is `value`."""
        longer = torch.maximum(self.magnitude * y.value.abs(), self.value.abs() * y.magnitude)
        both = self.arithmetic.relative(min(self.roundings, y.roundings)) * (self.magnitude * y.magnitude)
        magnitude = self._with_underflow((longer + both).nan_to_num(nan=math.inf, posinf=math.inf))
        return self._made(value, magnitude, self.roundings + y.roundings + 1)

    def __neg__(self) -> Operand:
        return self._made(-self.value, self.magnitude, self.roundings)

    def __add__(self, other: Quantity) -> Operand:
        x, y = joined(self, other)
        return x._made(x.value + y.value, x.magnitude + y.magnitude, max(x.roundings, y.roundings) + 1)

    def __radd__(self, other: Quantity) -> Operand:
        return self.__add__(other)

    def __sub__(self, other: Quantity) -> Operand:
        return self.__add__(-other)

    def __rsub__(self, other: Quantity) -> Operand:
        return (-self).__add__(other)

    def __mul__(self, other: Quantity) -> Operand:
        x, y = joined(self, other)
        return x._product(x.value * y.value, y)

    def __rmul__(self, other: Quantity) -> Operand:
        return self.__mul__(other)

    def __truediv__(self, other: Quantity) -> Operand:
        x, y = joined(self, other)
        size = y.value.abs()
        least = size - y.bound
        magnitude = torch.where(least > 0, y.magnitude / (size * least), math.inf)
        return x._product(x.value / y.value, x._made(1 / y.value, magnitude, y.roundings))

    def __rtruediv__(self, other: Quantity) -> Operand:
        y, x = joined(self, other)
        return x.__truediv__(y)

    def __pow__(self, exponent: float) -> Operand:
        """Return a power of what is positive; a pow that is 2 ulps off is allowed for."""
        value, bound = self.value**exponent, self.bound
        least = self.value - bound
        slope = abs(exponent) * torch.maximum(least ** (exponent - 1), (self.value + bound) ** (exponent - 1))
        magnitude = torch.where(least > 0, torch.maximum(slope * self.magnitude, value.abs()), math.inf)
        return self._made(value, self._with_underflow(magnitude), self.roundings + 3)

    def __rpow__(self, base: float) -> Operand:
        """Return the power of a positive constant. Its cast moves it by u, so that its t-th power moves by t u."""
        value, bound = base**self.value, self.bound
        slope = abs(math.log(base)) * torch.maximum(base ** (self.value - bound), base ** (self.value + bound)) if base else 0.0
        magnitude = value * (1 + self.value.abs()) + slope * self.magnitude
        return self._made(value, self._with_underflow(magnitude), self.roundings + 3)


def joined(*quantities: Quantity) -> list[Operand]:
    """Return quantities, at least one an operand, as operands of one arithmetic: the tensors', or else the coarsest there is."""
    met = [quantity.arithmetic for quantity in quantities if isinstance(quantity, Operand)]
    arithmetic = max(met, key=lambda each: (not each.scalar, each.u))
    return [_in(arithmetic, quantity) for quantity in quantities]


def _in(arithmetic: Arithmetic, quantity: Quantity) -> Operand:
    if isinstance(quantity, Operand):
        return quantity if quantity.arithmetic == arithmetic else arithmetic.cast(quantity)
    return arithmetic.exact(quantity) if isinstance(quantity, Tensor) else arithmetic.constant(quantity)


def sqrt(x: Quantity) -> Quantity:
    """Return the root; what rounding has put below zero counts as zero."""
    if isinstance(x, Tensor):
        return x.clamp(min=0).sqrt()
    if not isinstance(x, Operand):
        return math.sqrt(max(x, 0.0))
    relative, bound = x.arithmetic.relative(x.roundings), x.bound
    value = x.value.clamp(min=0)
    root, least = value.sqrt(), (value - bound).clamp(min=0).sqrt()
    # e / (sqrt(v) + sqrt(v - e)), not sqrt(v) - sqrt(v - e): in float64 the difference would be rounding alone.
    moved = torch.where(value >= bound, bound / (root + least), torch.maximum(root, (value + bound).sqrt() - root))
    magnitude = torch.where(bound > 0, torch.maximum(moved / relative, root), root) if relative else root
    return x._made(root, magnitude, x.roundings + 1)


def absolute(x: Quantity) -> Quantity:
    """Return the absolute value; exact."""
    return x._made(x.value.abs(), x.magnitude, x.roundings) if isinstance(x, Operand) else abs(x)


def maximum(x: Quantity, y: Quantity) -> Quantity:
    """Return the larger of the two; exact."""
    if isinstance(x, Operand) or isinstance(y, Operand):
        x, y = joined(x, y)
        apart, unsure = x.value - y.value, x.bound + y.bound
        either = torch.where(apart > unsure, x.magnitude, torch.maximum(x.magnitude, y.magnitude))
        magnitude = torch.where(-apart > unsure, y.magnitude, either)
        return x._made(torch.maximum(x.value, y.value), magnitude, max(x.roundings, y.roundings))
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return torch.maximum(*(torch.as_tensor(each, dtype=torch.float64) for each in (x, y)))
    return max(x, y)


def minimum(x: Quantity, y: Quantity) -> Quantity:
    """Return the smaller of the two; exact."""
    return -maximum(-x, -y)


def by_sign(x: Quantity, *, below: Quantity, at: Quantity, above: Quantity) -> Quantity:
    """Return `below`, `at` or `above` as x is negative, zero or positive; any of them where x lies within its bound of zero."""
    if not isinstance(x, (Tensor, Operand)):
        return above if x > 0 else below if x < 0 else at
    if isinstance(x, Tensor):
        return _picked(x, *(torch.as_tensor(branch, dtype=torch.float64, device=x.device) for branch in (below, at, above)))
    _, *branches = joined(x, below, at, above)
    roundings = max(x.roundings, 1, *(branch.roundings for branch in branches))
    value = _picked(x.value, *(branch.value for branch in branches))
    magnitude = _picked(x.value, *(branch.magnitude for branch in branches))
    spread = _highest(*(branch.value for branch in branches)) + _highest(*(-branch.value for branch in branches))
    largest = _highest(*(branch.magnitude for branch in branches))
    any_branch = largest + spread / branches[0].arithmetic.relative(roundings)
    unsure = (x.value.abs() <= x.bound) & (x.bound > 0)
    return branches[0]._made(value, torch.where(unsure, any_branch, magnitude), roundings)


def sign(x: Quantity) -> Quantity:
    """Return -1, 0 or 1."""
    return by_sign(x, below=-1.0, at=0.0, above=1.0)


def mix(old: Quantity, new: Quantity, weight: Quantity) -> Quantity:
    """Return (1 - weight) old + weight new, in whichever way it is computed.

    Kernels write it as that, as old + weight (new - old), or from 1/2 on as new - (1 - weight) (new - old); the magnitude covers
    all three.
    """
    if not isinstance(old, Operand):
        return (1 - weight) * old + weight * new
    old, new, w = joined(old, new, weight)
    value = (1 - w.value) * old.value + w.value * new.value
    both = old.magnitude + new.magnitude
    magnitude = torch.where(w.value < 0.5, old.magnitude + w.magnitude * both, new.magnitude + both)
    return old._made(value, old._with_underflow(magnitude), max(old.roundings, new.roundings) + w.roundings + 3)


def norm(x: Quantity, dim: int | None = None) -> Quantity:
    """Return the 2-norm, of all elements (0-d) or along `dim`, which stays with size 1."""
    if isinstance(x, Tensor):
        return torch.linalg.vector_norm(x, dim=dim, keepdim=dim is not None)
    n = x.value.numel() if dim is None else x.value.shape[dim]
    roundings = x.roundings + x.arithmetic.additions(n) + 3
    # Squares may underflow, each by up to u times the smallest normal number.
    lost = math.sqrt(n * x.arithmetic.u * x.arithmetic.normal) / max(x.arithmetic.relative(roundings), x.arithmetic.u)
    magnitude = norm(x.magnitude.expand_as(x.value), dim)
    magnitude = torch.where(magnitude == 0, magnitude, magnitude + lost)
    return x._made(norm(x.value, dim), magnitude, roundings)


def mean(x: Quantity, dim: int) -> Quantity:
    """Return the mean along `dim`, which stays with size 1."""
    if isinstance(x, Tensor):
        return x.mean(dim=dim, keepdim=True)
    roundings = x.roundings + x.arithmetic.additions(x.value.shape[dim]) + 2
    return x._made(mean(x.value, dim), x._with_underflow(mean(x.magnitude.expand_as(x.value), dim)), roundings)


def beside(t: Quantity, other: Quantity) -> Quantity:
    """Return the number of the step in the arithmetic of another scalar, where that is an operand."""
    return other.arithmetic.exact(t.value) if isinstance(t, Operand) and isinstance(other, Operand) else t


def shape(x: Quantity) -> torch.Size:
    """Return the shape of a tensor or an operand."""
    found: torch.Size = (x.value if isinstance(x, Operand) else x).shape
    return found


def unbounded(value: Tensor, x: Operand) -> Operand:
    """Return a value made of x whose error no sum of magnitudes bounds in a useful way."""
    return x._made(value, torch.full_like(value, math.inf), max(x.roundings, 1))


def _picked(x: Tensor, below: Tensor, at: Tensor, above: Tensor) -> Tensor:
    return torch.where(x > 0, above, torch.where(x < 0, below, at))


def _highest(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    return torch.maximum(torch.maximum(first, second), third)
