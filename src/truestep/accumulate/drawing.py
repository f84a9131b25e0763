"""Batches drawn ahead: a window's total is to be known before its first backward.

accelerate flags the end of a loader when its last batch is *drawn*. So what it flags is kept with each batch, and put back as the
batch is used; before the next draw it is what the loader itself left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from truestep.accumulate.weights import wrong_counts
from truestep.backends import base
from truestep.backends.base import Undo
from truestep.words.finding import Finding


@dataclass
class Drawn:
    """A batch that was drawn ahead, and what tells its loader how far it was then."""

    batch: Any
    restore: Undo


class Draws:
    """One pass over a loader, a window at a time.

    Args:
        loader: Any iterable.
        passed: Batches that an earlier run has used: passed by, unless the loader can be told by a state of its own.
    """

    def __init__(self, loader: Iterable[Any], passed: int = 0) -> None:
        self._loader = loader
        self._passed = 0 if hasattr(loader, "load_state_dict") else passed
        self._iterator: Iterator[Any] | None = None
        self._is_over = False
        self._as_left: Undo = lambda: None
        self.last: Any = None
        self.ever = False

    def take(self, count: int) -> tuple[list[Drawn], Exception | None]:
        """Return up to `count` batches, and what the loader raised instead of one."""
        drawn: list[Drawn] = []
        self._as_left()
        try:
            if self._iterator is None:
                self._iterator = islice(iter(self._loader), self._passed, None)
            while len(drawn) < count and not self._is_over:
                drawn.append(Drawn(next(self._iterator), base.drawn()))
        except StopIteration:
            self._is_over = True
        except Exception as reason:
            return drawn, reason
        self._as_left = base.drawn()
        if drawn:
            self.last, self.ever = drawn[-1].batch, True
        return drawn, None

    def end(self) -> None:
        """Leave the loader as it left itself."""
        self._as_left()


def counted(drawn: list[Drawn], num_items: Callable[[Any], Any]) -> tuple[list[float], list[Finding], Exception | None]:
    """Return the items of each batch, what is wrong with these numbers, and what `num_items` raised."""
    try:
        counts = [float(num_items(each.batch)) for each in drawn]
    except Exception as reason:
        return [], [], reason
    return counts, wrong_counts(counts), None
