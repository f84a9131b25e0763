"""How far a correctly computed gradient or norm may lie from its exact value: derived bounds, no tolerances.

Note: the bound of a reduced gradient
    A sum of n terms in floating point, in any order, errs by at most gamma_(n-1)(u) times the sum of their magnitudes,
    where u is the unit roundoff and gamma_n(u) = n u / (1 - n u) (N. J. Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd ed., section 4.2). A rank adds K micro-batches (K - 1 additions, and up to two roundings for a scale and
    a cast: K + 1) in a dtype of roundoff u_a; W ranks add their sums (W - 1 additions, a cast, a division: W + 1) in one of
    roundoff u_r. Each error factor of the second stage multiplies one of the first, so every element obeys

        abs(g - sum c_kr g_kr)  <=  ((1 + gamma_(K+1)(u_a)) (1 + gamma_(W+1)(u_r)) - 1) sum abs(c_kr g_kr)

    and where a product may underflow, plus one smallest subnormal each: K + W + 2. What is compared with is itself
    computed, in float64, and its own error is in the bound too: nothing for float32, decisive for float64 gradients.

Note: the bound of a norm
    On the scale of the sum of squares, an element passes a square and n - 1 additions; every further stage (a norm per
    tensor, one per rank) a square root and a square, 3 roundings there, and the additions of its own terms. If m roundings
    are passed in all, the computed sum is S (1 + t) + a, abs(t) <= gamma_m(u), abs(a) <= one smallest subnormal a square,
    and the roots of the ends of that interval, with the last root's rounding, bound the norm, in any order.

    From about two million elements on, in float32, that bound says nothing. There rounding errors are taken as random and
    independent of each other, and gamma_m becomes exp(8 sqrt(m) u + m u^2 / (1 - u)) - 1, which such errors exceed with a
    probability below 2 exp(-32 (1 - u)^2), 3e-14 (N. J. Higham, T. Mary, A New Approach to Probabilistic Rounding Error
    Analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

from truestep.words.errors import TrueStepError

# The step of clipping after the norm is known: norm + 1e-6, a division, perhaps a reciprocal, and the product with the gradient.
CLIP_ROUNDINGS: Final = 4
CLIP_EPS: Final = 1e-6
MEANINGFUL_UP_TO: Final = 1 / 8
DEVIATIONS: Final = 8
_U64: Final = 2.0**-53

L = TypeVar("L")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Expected:
    """What a tensor should be.

    Attributes:
        value: float64, of the tensor's shape.
        bound: float64, of the same shape: how far the found one may lie from it, element by element.
    """

    value: Tensor
    bound: Tensor


@dataclass(frozen=True)
class Worst:
    """The element that lies furthest out, measured in its bound.

    Attributes:
        ratio: abs(found - expected) / bound: up to 1 holds. Infinite where nothing may differ but does.
        index: Of the element; None for a tensor without elements.
        found: Its value.
        expected: What it should be.
    """

    ratio: float
    index: tuple[int, ...] | None
    found: float
    expected: float


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return u: the largest relative error of rounding to `dtype`, half its machine epsilon.

    >>> unit_roundoff(torch.bfloat16) == 2**-8, unit_roundoff(torch.float32) == 2**-24
    (True, True)
    """
    return float(torch.finfo(dtype).eps) / 2


def smallest_subnormal(dtype: torch.dtype) -> float:
    """Return the spacing of `dtype` around zero.

    >>> smallest_subnormal(torch.float32) == 2**-149
    True
    """
    about = torch.finfo(dtype)
    return float(about.smallest_normal) * float(about.eps)


def gamma(n: int, u: float) -> float:
    """Return gamma_n(u) = n u / (1 - n u), the relative error after n roundings; infinite where n u reaches 1."""
    return n * u / (1 - n * u) if n * u < 1 else math.inf


def likely(n: int, u: float) -> float:
    """Return the relative error after n roundings that independent ones exceed with a probability below 3e-14."""
    return math.expm1(DEVIATIONS * math.sqrt(n) * u + n * u * u / (1 - u))


def says_nothing(n: int, u: float) -> bool:
    """Return whether a bound over n roundings is too wide to mean anything: n u > 1/8 (bf16 from 33 on)."""
    return n * u > MEANINGFUL_UP_TO


def replayed(local_grads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a rank's own accumulation, replayed bit for bit: its micro-batches' gradients added up in their order, in `dtype`.

    With it in place of the micro-batches only the ranks' own sum is left to bound (``accumulate_dtype=None``).

    Args:
        local_grads: One tensor a micro-batch, in order, each as its backward made it.
        dtype: Of the buffer that the rank accumulates in.

    Returns:
        A new tensor of that dtype.
    """
    first, *others = local_grads
    total = first.detach().to(dtype, copy=True)
    for gradient in others:
        total.add_(gradient.detach())
    return total


def reduction_bound(
    grads: Sequence[Sequence[Tensor]],
    coefficients: Sequence[Sequence[float]],
    *,
    accumulate_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype,
    n_extra: int = 0,
    extra_dtype: torch.dtype | None = None,
) -> Expected:
    """Return what the reduced gradient should be and how far off it may be; see the note at the top of the module.

    Args:
        grads: By rank, then by micro-batch: the local gradients, all of one shape, any float dtype.
        coefficients: Laid out likewise: the weight that the contract gives each (1 / W for a mean over ranks of a summed window).
        accumulate_dtype: In which a rank adds up; None where that sum was `replayed`, or there is but one micro-batch unscaled.
        reduce_dtype: In which the ranks add up.
        n_extra: Roundings that come after: `CLIP_ROUNDINGS` where a clip factor is part of the coefficients, 1 for a last cast.
        extra_dtype: In which they happen; the coarser of the other two if not given.

    Raises:
        TrueStepError: If the lists do not match in length.
    """
    ranks, micros = len(grads), max((len(of_rank) for of_rank in grads), default=0)
    if not ranks or not micros:
        raise TrueStepError("expected at least one local gradient, found none. Pass grads[rank][micro-batch].")
    pairs = [(c, g) for of_rank, row in _matched(grads, coefficients) for g, c in _matched(of_rank, row)]
    shape, device = pairs[0][1].shape, pairs[0][1].device
    value = torch.zeros(shape, dtype=torch.float64, device=device)
    magnitude = torch.zeros_like(value)
    for coefficient, gradient in pairs:
        term = gradient.detach().to(torch.float64) * coefficient
        value += term
        magnitude += term.abs_()
    dtypes = [reduce_dtype, *([accumulate_dtype] if accumulate_dtype else [])]
    extra_u = unit_roundoff(extra_dtype) if extra_dtype else max(unit_roundoff(dtype) for dtype in dtypes)
    stages = [
        gamma(micros + 1, unit_roundoff(accumulate_dtype)) if accumulate_dtype else 0.0,
        gamma(ranks + 1, unit_roundoff(reduce_dtype)),
        gamma(n_extra, extra_u),
        gamma(2 * (len(pairs) + 2), _U64),
    ]
    if extra_dtype:
        dtypes.append(extra_dtype)
    underflow = (micros + ranks + 2 + n_extra) * max(smallest_subnormal(dtype) for dtype in dtypes)
    relative = compounded(stages)
    # Where the terms are all zero the sum is exactly zero, however many roundings it took: 0 * inf is not what is meant.
    bound = torch.where(magnitude == 0, magnitude, magnitude * relative)
    return Expected(value, bound.add_(underflow))


def compounded(errors: Iterable[float]) -> float:
    """Return the relative error of stages that follow each other, (1 + a)(1 + b).. - 1: their sum and their products."""
    return math.expm1(math.fsum(math.log1p(error) for error in errors))


def worst(found: Tensor, expected: Expected) -> Worst:
    """Return the element of `found` that lies furthest from what is expected, in units of its bound.

    Not-a-number where not-a-number is expected agrees, as does an infinity of the same sign; any other value that is not
    finite is infinitely far.

    Raises:
        TrueStepError: If the shapes differ.
    """
    if found.shape != expected.value.shape:
        raise TrueStepError(
            f"expected a tensor of shape {tuple(expected.value.shape)}, found {tuple(found.shape)}. Compare like with like."
        )
    if not found.numel():
        return Worst(0.0, None, 0.0, 0.0)
    value = expected.value
    mine = found.detach().to(value)
    agrees = (mine == value) | (mine.isnan() & value.isnan())
    ratio = (mine - value).abs_().div_(expected.bound)
    ratio.masked_fill_(~(mine.isfinite() & value.isfinite()), math.inf).masked_fill_(agrees, 0.0)
    ratio.nan_to_num_(nan=math.inf, posinf=math.inf)  # inf/inf: neither the difference nor its bound fit float64
    flat = int(ratio.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), found.shape)) if found.ndim else ()
    return Worst(float(ratio.reshape(-1)[flat]), index, float(mine.reshape(-1)[flat]), float(value.reshape(-1)[flat]))


def norm_bound(
    tensors: Iterable[Tensor],
    *,
    dtype: torch.dtype,
    ranks: int = 1,
    n_extra: int = 0,
) -> Expected:
    """Return the 2-norm over all tensors together, and how far one computed in `dtype` may be from it; see the note above.

    It covers one flat sum, a norm of the tensors' norms (as `clip_grad_norm_` takes it) and a sum over the ranks' parts,
    each in any order; where that bound is too wide to mean anything, the likely one of the note above takes its place.

    Args:
        tensors: The reduced gradient, of any shapes and float dtypes.
        dtype: In which squares are added up.
        ranks: W, over which parts are added up.
        n_extra: Further roundings, of the norm itself (a cast, a division by the loss scale).

    Returns:
        0-d float64 tensors on the CPU.
    """
    gradients = [tensor.detach() for tensor in tensors]
    n = sum(tensor.numel() for tensor in gradients)
    total = math.fsum(float(tensor.to(torch.float64).square_().sum()) if tensor.numel() else 0.0 for tensor in gradients)
    u, roundings = unit_roundoff(dtype), norm_roundings(n, len(gradients), ranks)
    firm = likely(roundings, u) if says_nothing(roundings, u) else gamma(roundings, u)
    relative = compounded([firm, gamma(n + len(gradients) + 1, _U64)])
    absolute = (n + len(gradients) + ranks) * smallest_subnormal(dtype)
    value = math.sqrt(total)
    high = math.sqrt(total * (1 + relative) + absolute)
    low = math.sqrt(max(0.0, total * (1 - relative) - absolute))
    last = compounded([gamma(1 + n_extra, u), gamma(2, _U64)])
    bound = max(high * (1 + last) - value, value - low * (1 - min(last, 1.0)))
    return Expected(torch.tensor(value, dtype=torch.float64), torch.tensor(bound, dtype=torch.float64))


def norm_roundings(n_elements: int, n_tensors: int, ranks: int = 1) -> int:
    """Return how many roundings a square may pass on its way into a global norm, by any order and at most two inner stages."""
    return n_elements + (3 + n_tensors) + (3 + ranks)


def clip_factor(max_norm: float, norm: float) -> float:
    """Return what clipping multiplies each gradient by: min(1, max_norm / (norm + 1e-6)), as torch and DeepSpeed have it.

    Not-a-number where the norm is: clipping then makes every gradient so.

    >>> clip_factor(1.0, 0.5), clip_factor(1.0, 4.0 - 1e-6)
    (1.0, 0.25)
    """
    factor = max_norm / (norm + CLIP_EPS)
    return factor if factor < 1 or math.isnan(factor) else 1.0


def _matched(left: Sequence[L], right: Sequence[R]) -> Iterable[tuple[L, R]]:
    if len(left) != len(right):
        raise TrueStepError(
            f"expected a coefficient for each local gradient, found {len(right)} for {len(left)}. "
            "Pass coefficients[rank][micro-batch]."
        )
    return zip(left, right, strict=True)
