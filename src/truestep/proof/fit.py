"""Which combination of the local gradients a found gradient is: the fit that lets a broken reduction be named.

With the local gradients as columns, over all elements of one or many params, the found gradient is their combination with the
coefficients that the reduction really gave them. Least squares in float64 recovers these to three digits; what no combination
explains came from elsewhere.

Note: undetermined coefficients
    A column of zeros has no coefficient, and two columns that are one direction have only a common one. Such coefficients
    are NaN: nothing is concluded from them alone. A direction counts as lost where rounding, divided by its singular value,
    would blur coefficients by more than `BLURRED_AT_MOST`. Of m sampled elements' rounding errors, taken as random, only the
    share sqrt(n / m) falls into the space of n columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from truestep.proof.bounds import smallest_subnormal, unit_roundoff
from truestep.words.errors import TrueStepError

Grads: TypeAlias = "Sequence[Sequence[Sequence[Tensor | None]]]"
Rows: TypeAlias = tuple[tuple[float, ...], ...]

SAMPLED_UP_TO: Final = 200_000
# A small param among large ones is still seen: of each tensor at least this many elements, if it has them.
SAMPLED_AT_LEAST: Final = 64
DIGITS: Final = 1e-3
BLURRED_AT_MOST: Final = 0.1
DEVIATIONS: Final = 4  # standard deviations that a coefficient may be off


@dataclass(frozen=True)
class Fit:
    """The found gradient as a combination of the local ones.

    Attributes:
        coefficients: By rank, then by micro-batch; NaN where undetermined.
        shortest: The same without NaN: of all combinations that fit equally well, the shortest.
        previous: The same of the previous window's gradients; empty if they were not given.
        residual: Norm of what is left over that of the found gradient.
        blur: How far the coefficients may be off, relative to the typical one.
        unexplained: More is left than rounding leaves.
        deficient: Some coefficients are undetermined.
        absent: There was no gradient at all to fit.
    """

    coefficients: Rows
    shortest: Rows
    previous: Rows = ()
    residual: float = 0.0
    blur: float = DIGITS
    unexplained: bool = False
    deficient: bool = False
    absent: bool = False


def fit(
    found: Sequence[Tensor | None],
    grads: Grads,
    *,
    previous: Grads | None = None,
    dtype: torch.dtype | None = None,
    sampled_up_to: int = SAMPLED_UP_TO,
    seed: int = 0,
) -> Fit:
    """Fit the found gradient of one or several params by the local gradients of all ranks and micro-batches.

    Args:
        found: One tensor a param, or a piece of it; None where the step got no gradient: those are left out.
        grads: By rank, by micro-batch, by param: the local gradients, cut to the same pieces; None counts as zero.
        previous: Those of the window before, laid out likewise (it may have had another length).
        dtype: The coarsest in which gradients were added up: what rounding leaves; of the found tensors if not given.
        sampled_up_to: Elements in the fit, spread over the params, drawn by `seed`; the global generator is not touched.
        seed: Of the draw.

    Raises:
        TrueStepError: If there is no local gradient, or the params do not match in number or size.
    """
    shape = [len(of_rank) for of_rank in grads]
    if not sum(shape):
        raise TrueStepError("expected at least one local gradient, found none. Pass grads[rank][micro-batch][param].")
    kept = [place for place, tensor in enumerate(found) if tensor is not None and tensor.numel()]
    if not kept:
        nothing = tuple((math.nan,) * length for length in shape)
        return Fit(
            nothing,
            tuple((0.0,) * length for length in shape),
            deficient=True,
            absent=bool(found) and all(tensor is None for tensor in found),
        )
    target = [tensor for tensor in found if tensor is not None and tensor.numel()]
    columns = [micro for of_rank in grads for micro in of_rank]
    before = [micro for of_rank in previous or () for micro in of_rank]
    picks = _picks([tensor.numel() for tensor in target], sampled_up_to, seed)
    b = _sampled(target, picks, [tensor.numel() for tensor in target])
    wanted = [tensor.numel() for tensor in target]
    a = torch.stack([_sampled(_chosen(column, kept, len(found)), picks, wanted) for column in [*columns, *before]], dim=1)
    dtypes = [dtype] if dtype else [tensor.dtype for tensor in target]
    return _solved(a, b, dtypes, shape, [len(of_rank) for of_rank in previous or ()])


def _solved(a: Tensor, b: Tensor, dtypes: list[torch.dtype], shape: list[int], shape_before: list[int]) -> Fit:
    """Solve by QR of the normalised columns and the singular values of R: as good as of the tall matrix, and small."""
    u, subnormal = max(map(unit_roundoff, dtypes)), max(map(smallest_subnormal, dtypes))
    lengths = torch.linalg.vector_norm(a, dim=0)
    divisors = torch.where(lengths > 0, lengths, 1.0)
    q, r = torch.linalg.qr(a / divisors)
    left, singular, right = torch.linalg.svd(r, full_matrices=False)
    share = min(1.0, math.sqrt(a.shape[1] / a.shape[0]))
    firm = singular > singular.max() * max(u * share / BLURRED_AT_MOST, torch.finfo(torch.float64).eps * max(a.shape))
    inverse = torch.where(firm, 1 / torch.where(firm, singular, 1.0), 0.0)
    solution = (right.mT @ (inverse * (left.mT @ (q.mT @ b)))) / divisors
    # What the firm directions do not reach of a coefficient is undetermined: lost directions, or fewer elements than columns.
    lost = (1 - right[firm].square().sum(dim=0) > DIGITS) | (lengths == 0)

    target = float(torch.linalg.vector_norm(b))
    left_over = float(torch.linalg.vector_norm(b - a @ solution))
    reach = float(torch.linalg.vector_norm(a.abs() @ solution.abs()))
    noise = (max(shape) + len(shape) + 2) * (u * reach + subnormal * math.sqrt(a.shape[0]))
    typical = float((solution * lengths).abs().max()) or 1.0
    smallest = float(singular[firm].min()) if bool(firm.any()) else 1.0
    told = torch.where(lost, math.nan, solution).tolist()
    return Fit(
        coefficients=_rows(told, shape),
        shortest=_rows(solution.tolist(), shape),
        previous=_rows(told[sum(shape) :], shape_before),
        residual=left_over / target if target else 0.0,
        blur=min(BLURRED_AT_MOST, max(DIGITS, DEVIATIONS * share * left_over / smallest / typical)),
        unexplained=left_over > max(DIGITS * target, noise),
        deficient=bool(lost.any()),
    )


def _picks(sizes: list[int], sampled_up_to: int, seed: int) -> list[Tensor | None]:
    """Return, for each tensor, the indices of its sampled elements, or None for all of them."""
    total = sum(sizes)
    if total <= sampled_up_to:
        return [None] * len(sizes)
    generator = torch.Generator().manual_seed(seed)
    quotas = [max(min(size, SAMPLED_AT_LEAST), size * sampled_up_to // total) for size in sizes]
    return [
        None if quota >= size else torch.randint(size, (quota,), generator=generator)
        for size, quota in zip(sizes, quotas, strict=True)
    ]


def _sampled(tensors: Sequence[Tensor | None], picks: list[Tensor | None], sizes: list[int]) -> Tensor:
    parts = []
    for tensor, pick, size in zip(tensors, picks, sizes, strict=True):
        if tensor is None:
            parts.append(torch.zeros(size if pick is None else len(pick), dtype=torch.float64))
            continue
        if tensor.numel() != size:
            raise TrueStepError(
                f"expected a local gradient of {size} elements, found {tensor.numel()}. Cut both to the same piece."
            )
        flat = tensor.detach().reshape(-1)
        parts.append((flat if pick is None else flat[pick.to(flat.device)]).to("cpu", torch.float64))
    return torch.cat(parts)


def _chosen(column: Sequence[Tensor | None], kept: list[int], n_params: int) -> list[Tensor | None]:
    if len(column) != n_params:
        raise TrueStepError(
            f"expected the gradients of {n_params} params in each micro-batch, found {len(column)}. Use None for none."
        )
    return [column[place] for place in kept]


def _rows(flat: list[float], shape: list[int]) -> Rows:
    rest = iter(flat)
    return tuple(tuple(next(rest) for _ in range(length)) for length in shape)
