"""What each loss of a window weighs, so that the gradient is that of the mean over all items of all its micro-batches.

With n_rk items in micro-batch k of rank r, N = sum n_rk, and C the W ranks where the backend takes the mean over them (1 where it
takes the sum), a rank's loss l_rk is multiplied by

    mean over its items:  C n_rk / N        no item counts:  C / (micro-batches of all ranks)
    sum over its items:   C / N             no item counts:  C

Counts that are known only after the forward leave N to the end: losses are multiplied by n_rk, or 1, and the gradient by C / N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from truestep.words.finding import Finding


@dataclass(frozen=True)
class Weights:
    """What one rank's losses weigh.

    Attributes:
        shares: Of each micro-batch of this rank, the replayed ones 0: before the ranks' own mean.
        ranks: C.
        items: N, or None where nobody counts.
    """

    shares: tuple[float, ...]
    ranks: int
    items: float | None

    def factor(self, index: int) -> float:
        """Return what the loss of a micro-batch is multiplied by."""
        return self.shares[index] * self.ranks


def known_ahead(
    counts: Sequence[float] | None, total: float, micro_batches: int, length: int, ranks: int, reduction: str
) -> Weights:
    """Return the weights of a window whose batches are drawn.

    Args:
        counts: Items of each of this rank's micro-batches; None where nobody counts.
        total: The items of all ranks, or where nobody counts the micro-batches of all ranks.
        micro_batches: This rank's own.
        length: The window's; what is beyond this rank's own is replayed, and weighs nothing.
        ranks: C.
        reduction: What a loss is over its own items: ``mean`` or ``sum``.

    >>> known_ahead([1, 3], 8.0, 2, 2, 2, "mean").shares
    (0.125, 0.375)
    >>> known_ahead(None, 3, 1, 2, 2, "mean").shares
    (0.3333333333333333, 0.0)
    """
    if counts is None:
        share = 1.0 / total if reduction == "mean" else 1.0
        own = [share] * micro_batches
    else:
        own = [(count if reduction == "mean" else 1.0) / total if count else 0.0 for count in counts]
    return Weights((*own, *[0.0] * (length - len(own))), ranks, None if counts is None else total)


def wrong_counts(counts: Sequence[float]) -> list[Finding]:
    """Return what is wrong with item counts: those that are negative, or no finite number."""
    return [
        Finding(
            "window/item-count",
            None,
            "error",
            expected="a finite number of items, 0 or more",
            found=f"{count:g} in micro-batch {index} of the window",
            fix="Give the number of items that the loss of the micro-batch is over.",
        )
        for index, count in enumerate(counts, 1)
        if not (math.isfinite(count) and count >= 0)
    ][:1]


def no_items() -> Finding:
    """Return what is said of a window without a single item."""
    return Finding(
        "window/no-items",
        None,
        "error",
        expected="at least one item in the window, on any rank",
        found="0 in all its micro-batches: a mean over nothing",
        fix="Leave such batches out, or check num_items.",
    )
