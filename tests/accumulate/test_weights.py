"""What losses weigh: always so that the gradient is that of the mean over all items."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truestep.accumulate.weights import known_ahead, wrong_counts

COUNTS = st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=1, max_size=4).filter(
    lambda rows: any(any(row) for row in rows) and all(rows)
)


def weights_of(rows, reduction, contract):
    """Return the weights of every rank of a window."""
    length, total = max(map(len, rows)), sum(map(sum, rows))
    return [known_ahead(row, total, len(row), length, contract, reduction) for row in rows]


@given(COUNTS)
def test_losses_that_are_means_weigh_their_items(rows):
    total = sum(map(sum, rows))
    for row, weights in zip(rows, weights_of(rows, "mean", len(rows)), strict=True):
        for index, count in enumerate(row):
            # C n / N, which the backend's mean over C ranks turns into n / N.
            assert weights.factor(index) == pytest.approx(len(rows) * count / total, rel=4 * 2**-53)


@given(COUNTS)
def test_losses_that_are_sums_weigh_alike_unless_they_are_over_nothing(rows):
    total = sum(map(sum, rows))
    for row, weights in zip(rows, weights_of(rows, "sum", 1), strict=True):
        assert [weights.factor(index) for index in range(len(row))] == [1 / total if count else 0.0 for count in row]


@given(COUNTS)
def test_what_is_replayed_weighs_nothing(rows):
    for row, weights in zip(rows, weights_of(rows, "mean", len(rows)), strict=True):
        assert len(weights.shares) == max(map(len, rows))
        assert not any(weights.shares[len(row) :])


def test_without_counts_every_micro_batch_weighs_the_same():
    assert known_ahead(None, 5, 3, 3, 2, "mean").shares == (0.2, 0.2, 0.2)
    assert known_ahead(None, 5, 2, 3, 2, "mean").shares == (0.2, 0.2, 0.0)
    assert known_ahead(None, 5, 3, 3, 2, "sum").factor(0) == 2.0


@pytest.mark.parametrize("count", [-1.0, math.nan, math.inf])
def test_a_count_that_is_none_is_told_with_its_place(count):
    (finding,) = wrong_counts([3.0, count, -7.0])
    assert finding.code == "window/item-count"
    assert finding.found == f"{count:g} in micro-batch 2 of the window"


def test_counts_of_zero_and_more_are_right():
    assert wrong_counts([0.0, 2.5, 1e9]) == []
