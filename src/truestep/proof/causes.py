"""What went wrong with a gradient, named from the coefficients of its fit.

A *ratio* is a coefficient over the one that the contract gives; 1 everywhere is right. The table is read from the top and
the first row that matches names the cause, so that the order is part of it:

1. what no ratio can tell: absent, from an older window, unexplained, zero, undetermined;
2. which gradients are in it at all, ranks before micro-batches: on a rank that never reduced, nothing else is to be told;
3. a factor on all of them, W and K before any other: where W = K they cannot be told apart, and the text says both;
4. single micro-batches, then weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from truestep.proof.fit import Fit, Rows
from truestep.words.errors import TrueStepError
from truestep.words.finding import listed

# size: one table, and the predicates that only its rows use
Matched: TypeAlias = Mapping[str, Any] | None


@dataclass(frozen=True)
class Cause:
    """The fault behind a wrong gradient.

    Attributes:
        slug: Of its row.
        text: What happened, with its numbers.
        fix: What to do about it, an imperative sentence.
    """

    slug: str
    text: str
    fix: str


@dataclass(frozen=True)
class Seen:
    """What the rows look at.

    Attributes:
        fit: The fit.
        ratios: By rank, then by micro-batch; NaN where the fit could not tell.
        expected: The contract's coefficients.
        weights: What each loss counts in the window's, laid out likewise.
        rank: Whose gradient it is.
    """

    fit: Fit
    ratios: Rows
    expected: Rows
    weights: Rows
    rank: int

    @property
    def n_ranks(self) -> int:
        """W, the ranks that are reduced over."""
        return len(self.ratios)

    @property
    def n_micros(self) -> int:
        """K, the longest window of any rank."""
        return max(len(row) for row in self.ratios)

    @property
    def known(self) -> list[float]:
        """The ratios that are determined."""
        return [ratio for row in self.ratios for ratio in row if not math.isnan(ratio)]

    def near(self, value: float, to: float) -> bool:
        """Tell whether a ratio is that number, as far as the fit can see."""
        return abs(value - to) <= self.fit.blur * max(1.0, abs(to))

    def common(self, ratios: Iterable[float]) -> float | None:
        """Return the one value of all these ratios, or None."""
        return common(ratios, self.fit.blur)

    @property
    def divided(self) -> bool:
        """Whether each local gradient was divided by K before it was reduced: such a one counts 1 / W in the mean."""
        share = self.common(expected for row in self.expected for expected in row)
        return share is not None and self.near(share * self.n_ranks, 1.0)

    def silent_ranks(self) -> list[int]:
        """Return the ranks of whose gradients nothing is in it."""
        return [rank for rank, row in enumerate(self.ratios) if self._zero(row)]

    def silent_micros(self) -> list[int]:
        """Return the micro-batches of which no rank's gradient is in it."""
        return [k for k in range(self.n_micros) if self._zero([row[k] for row in self.ratios if k < len(row)])]

    def _zero(self, ratios: Sequence[float]) -> bool:
        values = [ratio for ratio in ratios if not math.isnan(ratio)]
        return bool(values) and all(self.near(value, 0.0) for value in values)


@dataclass(frozen=True)
class Row:
    """One cause.

    Attributes:
        slug: Its name.
        match: Returns the fields of its texts where it applies, else None.
        text: A format string over these fields.
        fix: Likewise.
    """

    slug: str
    match: Callable[[Seen], Matched]
    text: str
    fix: str


def cause(
    fit: Fit, expected: Sequence[Sequence[float]], rank: int, weights: Sequence[Sequence[float]] | None = None
) -> Cause | None:
    """Return the cause that the fitted coefficients point to, or None where they are as expected.

    Args:
        fit: Of the found gradient.
        expected: By rank, then by micro-batch: the coefficients of the contract.
        rank: Whose gradient it is.
        weights: Laid out likewise: what each loss counts in the window's; the same as `expected` unless the loop has scaled its
            losses before their backward.

    Raises:
        TrueStepError: If the two are not laid out alike.
    """
    if [len(row) for row in expected] != [len(row) for row in fit.coefficients]:
        raise TrueStepError(
            f"expected coefficients for {[len(row) for row in fit.coefficients]} micro-batches a rank, found "
            f"{[len(row) for row in expected]}. Pass expected[rank][micro-batch]."
        )
    rows = tuple(tuple(row) for row in expected)
    seen = Seen(fit, _told(fit, expected), rows, tuple(tuple(row) for row in weights or rows), rank)
    for known in CAUSES:
        if (fields := known.match(seen)) is not None:
            return None if known.slug == RIGHT else Cause(known.slug, known.text.format(**fields), known.fix.format(**fields))
    raise TrueStepError("no row of the table of causes matched: its last row must always do")


def _told(fit: Fit, expected: Sequence[Sequence[float]]) -> Rows:
    """Return the ratios; where none is determined, those of the shortest combination if they are one factor on all.

    Ranks that were given the same data leave no coefficient determined, but still tell a sum from a mean.
    """
    ratios = _ratios(fit.coefficients, expected)
    if all(math.isnan(ratio) for row in ratios for ratio in row):
        shortest = _ratios(fit.shortest, expected)
        if common((ratio for row in shortest for ratio in row), fit.blur) is not None:
            return shortest
    return ratios


def _ratios(coefficients: Rows, expected: Sequence[Sequence[float]]) -> Rows:
    return tuple(
        tuple(c / e if e else math.nan for c, e in zip(mine, theirs, strict=True))
        for mine, theirs in zip(coefficients, expected, strict=True)
    )


def common(ratios: Iterable[float], blur: float) -> float | None:
    """Return the one value of all these ratios, NaN apart; None if they have several, as far as `blur` lets see, or none."""
    values = [ratio for ratio in ratios if not math.isnan(ratio)]
    middle = math.fsum(values) / len(values) if values else 0.0
    within = blur * (abs(middle) if abs(middle) > blur else 1.0)
    return middle if values and all(abs(value - middle) <= within for value in values) else None


# -- the rows' predicates, in the order of the table


def _older(seen: Seen) -> Matched:
    scale = max((abs(e) for row in seen.expected for e in row), default=0.0) or 1.0
    older = max((abs(c) for row in seen.fit.previous for c in row if not math.isnan(c)), default=0.0)
    if seen.fit.unexplained or older <= 2 * seen.fit.blur * scale:
        return None
    alone = all(seen.near(ratio, 0.0) for ratio in seen.known)
    how = "is the previous window's alone" if alone else "still holds the previous window's"
    return {"how": how, "factor": _number(older / scale)}


def _zeroed(seen: Seen) -> Matched:
    return {} if seen.known and all(seen.near(ratio, 0.0) for ratio in seen.known) else None


def _right(seen: Seen) -> Matched:
    return {} if seen.known and all(seen.near(ratio, 1.0) for ratio in seen.known) else None


def _own_rank_only(seen: Seen) -> Matched:
    silent = seen.silent_ranks()
    others = [rank for rank in range(seen.n_ranks) if rank != seen.rank]
    if not others or silent != others:
        return None
    return {"rank": seen.rank, "W": seen.n_ranks}


def _some_ranks_only(seen: Seen) -> Matched:
    silent = seen.silent_ranks()
    if not silent or len(silent) == seen.n_ranks:
        return None
    return {"silent": listed(silent), "W": seen.n_ranks, "be": "is" if len(silent) == 1 else "are"}


def _one_micro_only(seen: Seen) -> Matched:
    heard = set(range(seen.n_micros)) - set(seen.silent_micros())
    return _micros_only(seen, heard.pop()) if len(heard) == 1 else None


def _micros_only(seen: Seen, k: int) -> Matched:
    if seen.n_micros == 1 or seen.silent_micros() != [other for other in range(seen.n_micros) if other != k]:
        return None
    factor = seen.common(row[k] for row in seen.ratios if k < len(row))
    times = "" if factor is None or seen.near(factor, 1.0) else f", times {_number(factor)}"
    return {"K": seen.n_micros, "k": k + 1, "lost": seen.n_micros - 1, "times": times}


def _some_micros_only(last: bool) -> Callable[[Seen], Matched]:
    """Return the predicate of several micro-batches at the window's end, or at its beginning, that alone are in it."""

    def match(seen: Seen) -> Matched:
        lost = len(seen.silent_micros())
        gone = list(range(lost)) if last else list(range(seen.n_micros - lost, seen.n_micros))
        if not 0 < lost < seen.n_micros or seen.silent_micros() != gone:
            return None
        return {"K": seen.n_micros, "n": seen.n_micros - lost, "lost": lost}

    return match


def _times(n_ranks: bool, n_micros: bool, inverse: bool) -> Callable[[Seen], Matched]:
    """Return the predicate of one factor on all ratios: W, K or both, or one over it."""

    def match(seen: Seen) -> Matched:
        if (n_ranks and seen.n_ranks == 1) or (n_micros and seen.n_micros == 1):
            return None
        if n_micros and not inverse and seen.divided:
            return None
        size = (seen.n_ranks if n_ranks else 1) * (seen.n_micros if n_micros else 1)
        factor = 1 / size if inverse else float(size)
        if not (seen.known and all(abs(ratio - factor) <= seen.fit.blur * factor for ratio in seen.known)):
            return None
        return {"W": seen.n_ranks, "K": seen.n_micros, "factor": size}

    return match


def _ranks_or_micros(inverse: bool) -> Callable[[Seen], Matched]:
    by_ranks, by_micros = _times(True, False, inverse), _times(False, True, inverse)
    return lambda seen: by_ranks(seen) if by_ranks(seen) is not None and by_micros(seen) is not None else None


def _scaled(seen: Seen) -> Matched:
    factor = seen.common(seen.known)
    return None if factor is None else {"factor": _number(factor)}


def _some_are(seen: Seen, value: float) -> Matched:
    """Match where some ratios are `value` and all others 1."""
    odd = [
        f"micro-batch {k + 1} of rank {rank}"
        for rank, row in enumerate(seen.ratios)
        for k, ratio in enumerate(row)
        if seen.near(ratio, value)
    ]
    rest = [ratio for ratio in seen.known if not seen.near(ratio, value)]
    return {"which": listed(odd)} if odd and rest and all(seen.near(ratio, 1.0) for ratio in rest) else None


def _given(seen: Seen) -> Rows:
    """Return what each loss really counts in the gradient, by rank, then by micro-batch."""
    pairs = zip(seen.ratios, seen.weights, strict=True)
    return tuple(tuple(ratio * weight for ratio, weight in zip(ratios, weights, strict=True)) for ratios, weights in pairs)


def _mean_of_means(seen: Seen) -> Matched:
    same = seen.common(given for row in _given(seen) for given in row)
    uneven = seen.common(weight for row in seen.weights for weight in row) is None
    return {} if same is not None and uneven else None


def _mean_of_ranks(seen: Seen) -> Matched:
    """Match where each rank weighs its own losses as it should among themselves, and every rank counts the same."""
    within = all(seen.common(row) is not None for row in seen.ratios)
    same = seen.common(math.fsum(row) for row in _given(seen))
    return {"W": seen.n_ranks} if within and same is not None else None


def _weighted_otherwise(seen: Seen) -> Matched:
    return {"ratios": "; ".join(f"rank {rank}: {listed(map(_number, row))}" for rank, row in enumerate(seen.ratios[:3]))}


def _number(value: float) -> str:
    return f"{value:.3g}"


RIGHT: Final = "right"
CAUSES: Final[tuple[Row, ...]] = (
    Row(
        "absent",
        lambda seen: {} if seen.fit.absent else None,
        "backward made a gradient, but none entered the step: it was cleared, or never reduced to where the optimizer looks",
        "Step before zero_grad, and reduce in the window's last micro-batch (FSDP2: set_requires_gradient_sync(True)).",
    ),
    Row(
        "older-window",
        _older,
        "what entered the step {how}, times {factor}",
        "Call zero_grad after every step, once a window.",
    ),
    Row(
        "unexplained",
        lambda seen: {"residual": f"{seen.fit.residual:.1%}"} if seen.fit.unexplained else None,
        "no combination of this window's local gradients ({residual} of it is left over)",
        "Look for an edit of .grad between backward and step, or a backward outside the window.",
    ),
    Row("zeroed", _zeroed, "all of it was zero when the step ran", "Move zero_grad after the step."),
    Row(
        "undetermined",
        lambda seen: None if seen.known else {},
        "the local gradients of this window are zero or too much alike to tell what became of each",
        "Run the check with micro-batches that differ.",
    ),
    Row(RIGHT, _right, "", ""),
    Row(
        "not-reduced",
        _own_rank_only,
        "only rank {rank}'s own gradients: they were never reduced over the {W} ranks",
        "Synchronise in the window's last micro-batch: leave no_sync, or set_requires_gradient_sync(True), before its backward.",
    ),
    Row(
        "some-ranks-only",
        _some_ranks_only,
        "nothing of rank {silent} is in it, which {be} among the {W} that reduce",
        "Give every rank the same process group and the same number of backward passes.",
    ),
    Row(
        "last-micro-batch-only",
        lambda seen: _micros_only(seen, seen.n_micros - 1),
        "the last micro-batch alone was used: the {lost} before it are lost{times}",
        "Tell the engine the window's length (gradient_accumulation_steps={K}), and call zero_grad only after the step.",
    ),
    Row(
        "first-micro-batch-only",
        lambda seen: _micros_only(seen, 0),
        "the first micro-batch of {K} alone was used: the step ran before the window was complete{times}",
        "Step once a window, after its last backward.",
    ),
    Row(
        "last-micro-batches-only",
        _some_micros_only(last=True),
        "the last {n} of {K} micro-batches alone were used: the {lost} before them are lost",
        "Call zero_grad only after the step, once a window.",
    ),
    Row(
        "first-micro-batches-only",
        _some_micros_only(last=False),
        "the first {n} of {K} micro-batches alone were used: the step ran before the window was complete",
        "Step once a window, after its last backward.",
    ),
    Row(
        "one-micro-batch-only",
        _one_micro_only,
        "micro-batch {k} of {K} alone was used{times}",
        "Step once a window, after its last backward, and call zero_grad only then.",
    ),
    Row(
        "summed-or-not-divided",
        _ranks_or_micros(inverse=False),
        "times {factor}: summed over the {W} ranks instead of averaged, or not divided by the {K} micro-batches",
        "Set the reduction to a mean, and divide each loss by the number of micro-batches, once.",
    ),
    Row(
        "summed-over-ranks",
        _times(True, False, inverse=False),
        "times {factor}: summed over the {W} ranks instead of averaged",
        "Set the reduction to a mean, or divide the loss by the global number of items.",
    ),
    Row(
        "not-divided-by-micro-batches",
        _times(False, True, inverse=False),
        "times {factor}: not divided by the {K} micro-batches",
        "Divide each loss by the number of micro-batches.",
    ),
    Row(
        "summed-and-not-divided",
        _times(True, True, inverse=False),
        "times {factor}: summed over the {W} ranks, and not divided by the {K} micro-batches",
        "Set the reduction to a mean, and divide each loss by the number of micro-batches.",
    ),
    Row(
        "divided-twice",
        _ranks_or_micros(inverse=True),
        "1/{factor} of it: divided twice by the {W} ranks, or by the {K} micro-batches",
        "Divide by each once: by the loop or by the framework, not by both.",
    ),
    Row(
        "divided-by-ranks-twice",
        _times(True, False, inverse=True),
        "1/{factor} of it: divided by the {W} ranks twice",
        "Divide by the ranks once: leave it to the framework's mean.",
    ),
    Row(
        "divided-by-micro-batches-twice",
        _times(False, True, inverse=True),
        "1/{factor} of it: divided by the {K} micro-batches twice",
        "Divide by the micro-batches once: in the loop, or by the framework (DeepSpeed and accelerate do), not in both.",
    ),
    Row(
        "divided-by-both-twice",
        _times(True, True, inverse=True),
        "1/{factor} of it: divided twice, by the {W} ranks and the {K} micro-batches",
        "Divide by each once: by the loop or by the framework, not by both.",
    ),
    Row(
        "scaled",
        _scaled,
        "all of it times {factor}",
        "Look for a clip, an unscale or a rescale of .grad that was not declared.",
    ),
    Row(
        "micro-batch-lost",
        lambda seen: _some_are(seen, 0.0),
        "lost: {which}",
        "Call zero_grad only after the step, and synchronise every window's end.",
    ),
    Row(
        "micro-batch-doubled",
        lambda seen: _some_are(seen, 2.0),
        "counted twice: {which}",
        "Run one backward a micro-batch, and reduce once a window.",
    ),
    Row(
        "mean-of-means",
        _mean_of_means,
        "every micro-batch has the same weight, though they hold different numbers of items: a mean of means",
        "Weigh each loss by its number of items over the window's, on all ranks together.",
    ),
    Row(
        "mean-of-ranks",
        _mean_of_ranks,
        "each of the {W} ranks counts the same, though they hold different numbers of items: a mean of the ranks' means",
        "Divide by the number of items of all ranks together (reduce it first), not by this rank's own.",
    ),
    Row(
        "weighted-otherwise",
        _weighted_otherwise,
        "weighted by other factors than expected ({ratios})",
        "Look for a loss scale that changes within the window, or differs between ranks.",
    ),
)
