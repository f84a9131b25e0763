"""A covering array is small, and no pair of values is missing from it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truestep.verification.pairwise import covering
from truestep.words.errors import TrueStepError

FACTORS = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(
    lambda sizes: {f"factor {index}": [f"{index}.{value}" for value in range(size)] for index, size in enumerate(sizes)}
)


def pairs_of(rows):
    """Return every pair of entries that meet in some row, in the plainest way."""
    return {frozenset(pair) for row in rows for pair in itertools.combinations(sorted(row.items()), min(2, len(row)))}


def product(factors):
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


@given(FACTORS, st.integers(0, 9))
def test_every_pair_of_values_of_any_two_factors_appears(factors, seed):
    rows = covering(factors, seed=seed)
    assert pairs_of(rows) == pairs_of(product(factors))
    assert all(list(row) == list(factors) for row in rows)


@given(FACTORS, st.integers(0, 9))
def test_no_row_is_forbidden_and_every_pair_of_an_allowed_row_appears(factors, seed):
    def allowed(row):
        return sum(int(value[-1]) for value in row.values()) % 3 != 1

    rows = covering(factors, allowed=allowed, seed=seed)
    assert all(map(allowed, rows))
    assert pairs_of(rows) == pairs_of(filter(allowed, product(factors)))


@given(FACTORS, st.integers(0, 9))
def test_every_row_brings_a_pair_that_no_earlier_one_has(factors, seed):
    rows = covering(factors, seed=seed)
    for index, row in enumerate(rows):
        assert pairs_of([row]) - pairs_of(rows[:index])


def test_it_is_much_smaller_than_the_product():
    factors = {"a": range(10), "b": range(4), "c": range(3), "d": range(3), "e": range(2)}  # 720 rows; at least 40 are needed
    assert 40 <= len(covering(factors)) <= 50


def test_the_same_seed_gives_the_same_rows_and_another_seed_others():
    factors = {"a": range(5), "b": range(4), "c": range(3)}
    assert covering(factors, seed=3) == covering(factors, seed=3)
    assert covering(factors, seed=3) != covering(factors, seed=4)


def test_values_need_not_be_hashable():
    assert covering({"a": [{"x": 1}, {"x": 2}], "b": [[1]]}) in (
        [{"a": {"x": 1}, "b": [1]}, {"a": {"x": 2}, "b": [1]}],
        [{"a": {"x": 2}, "b": [1]}, {"a": {"x": 1}, "b": [1]}],
    )


def test_where_nothing_is_allowed_there_are_no_rows():
    assert covering({"a": [1, 2], "b": [3]}, allowed=lambda row: False) == []


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"a": [1], "b": []}, "found none for b"),
        ({}, "found no factors"),
        ({str(index): range(10) for index in range(7)}, "found 10000000"),
    ],
)
def test_bad_factors_are_refused_in_one_message(factors, message):
    with pytest.raises(TrueStepError, match=message):
        covering(factors)
