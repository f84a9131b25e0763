"""Covering arrays: a few rows of a product in which every pair of values of any two factors still meets.

Most faults that depend on a combination depend on two of its values. The full product of the factors grows as their product; the
rows that bring every pair together grow as the product of the two largest alone.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from truestep.words.errors import TrueStepError

Row: TypeAlias = dict[str, Any]
Places: TypeAlias = tuple[int, ...]  # of a row's values, factor by factor

MOST_ROWS: Final = 1_000_000  # of the full product, which is gone through


def covering(factors: Mapping[str, Sequence[Any]], *, allowed: Callable[[Row], bool] | None = None, seed: int = 0) -> list[Row]:
    """Return rows in which every pair of values of any two factors appears, wherever an allowed row has it.

    Greedy: each row is one of those that bring the most pairs not yet met. Of one factor alone every value appears. The same call
    always returns the same rows.

    Args:
        factors: ``name -> values``.
        allowed: Says of a complete row whether it may be; by default every one may.
        seed: Which of equally good rows are taken.

    Raises:
        TrueStepError: If a factor has no values, or the full product has over a million rows.

    >>> rows = covering({"backend": ["ddp", "fsdp2"], "optimizer": ["sgd", "adamw"], "ranks": [2, 3]})
    >>> len(rows), all(set(row) == {"backend", "optimizer", "ranks"} for row in rows)
    (4, True)
    """
    _check(factors)
    names = list(factors)

    def row_of(places: Places) -> Row:
        return {name: factors[name][place] for name, place in zip(names, places, strict=True)}

    candidates = list(itertools.product(*(range(len(values)) for values in factors.values())))
    if allowed is not None:
        candidates = [places for places in candidates if allowed(row_of(places))]
    random.Random(seed).shuffle(candidates)
    return [row_of(places) for places in _chosen(candidates)]


def pairs(places: Places) -> frozenset[tuple[tuple[int, int], ...]]:
    """Return the pairs that a row brings together, each as two ``(factor, value)``; of a single factor its value alone.

    >>> sorted(pairs((4, 5)))
    [((0, 4), (1, 5))]
    """
    return frozenset(itertools.combinations(enumerate(places), min(2, len(places))))


def _check(factors: Mapping[str, Sequence[Any]]) -> None:
    empty = [name for name, values in factors.items() if not len(values)]
    if empty or not factors:
        found = f"none for {', '.join(empty)}" if empty else "no factors"
        raise TrueStepError(f"expected factors with at least one value each, found {found}. Leave an empty factor out.")
    count = math.prod(map(len, factors.values()))
    if count > MOST_ROWS:
        raise TrueStepError(f"expected a full product of at most {MOST_ROWS} rows, found {count}. Give fewer factors or values.")


def _chosen(candidates: Iterable[Places]) -> list[Places]:
    """Return candidates that together bring every pair that any of them brings."""
    # What a row still brings only shrinks, so an old count is an upper limit: only the row on top has to be counted again.
    brings = [(places, pairs(places)) for places in candidates]
    missing = set().union(*(each for _, each in brings))
    heap = [(-len(each), order) for order, (_, each) in enumerate(brings)]
    heapq.heapify(heap)
    chosen: list[Places] = []
    while missing:
        count, order = heapq.heappop(heap)
        places, each = brings[order]
        now = len(each & missing)
        if now == -count:
            chosen.append(places)
            missing -= each
        elif now:
            heapq.heappush(heap, (-now, order))
    return chosen
