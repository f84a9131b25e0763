"""Planted coefficients come back to three digits, and what cannot be told is said to be so."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from truestep.proof import fit as fits
from truestep.words.errors import TrueStepError

SHAPES = [(31, 7), (5,), (3, 4, 11)]
Window = list[list[list[Tensor]]]


def window(n_ranks: int, n_micros: int, seed: int, dtype: torch.dtype = torch.float32, alike: float = 0.0) -> Window:
    """Make local gradients; `alike` is the share that all of them have in common."""
    generator = torch.Generator().manual_seed(seed)
    shared = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [
        [
            [
                ((1 - alike) * torch.randn(shape, generator=generator) + alike * part).to(dtype)
                for shape, part in zip(SHAPES, shared, strict=True)
            ]
            for _ in range(n_micros)
        ]
        for _ in range(n_ranks)
    ]


def combined(grads: Window, coefficients: list[list[float]]) -> list[Tensor]:
    dtype = grads[0][0][0].dtype
    pairs = [(c, micro) for of_rank, row in zip(grads, coefficients, strict=True) for micro, c in zip(of_rank, row, strict=True)]
    return [sum(c * micro[place].double() for c, micro in pairs).to(dtype) for place in range(len(SHAPES))]


coefficients = st.integers(1, 3).flatmap(
    lambda n_micros: st.lists(st.lists(st.floats(-2, 2), min_size=n_micros, max_size=n_micros), min_size=1, max_size=3)
)


@given(coefficients, st.integers(0, 2**20), st.sampled_from([0.0, 0.9]))
@settings(max_examples=60, deadline=None)
def test_planted_coefficients_come_back_to_three_digits(planted: list[list[float]], seed: int, alike: float) -> None:
    grads = window(len(planted), len(planted[0]), seed, alike=alike)
    fit = fits.fit(combined(grads, planted), grads)
    for told, true in zip(fit.coefficients, planted, strict=True):
        assert told == pytest.approx(true, abs=1e-3)
    assert not fit.deficient
    assert not fit.unexplained


def test_a_bf16_gradient_is_explained_within_its_rounding() -> None:
    grads = window(2, 3, 7, torch.bfloat16)
    planted = [[0.5, 0.0, 1.0], [0.5, 0.25, 1.0]]
    fit = fits.fit(combined(grads, planted), grads)
    assert not fit.unexplained
    for told, true in zip(fit.coefficients, planted, strict=True):
        assert told == pytest.approx(true, abs=fit.blur)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_no_combination_gives_is_unexplained(dtype: torch.dtype) -> None:
    grads, other = window(2, 2, 3, dtype), window(1, 1, 4, dtype)
    found = [a + 0.5 * b for a, b in zip(combined(grads, [[0.5] * 2] * 2), other[0][0], strict=True)]
    fit = fits.fit(found, grads)
    assert fit.unexplained
    assert 0.3 < fit.residual < 0.7


def test_an_older_window_is_found_where_its_gradients_are_given() -> None:
    grads, before = window(2, 2, 3), window(2, 3, 5)
    found = [a + b for a, b in zip(combined(grads, [[0.5] * 2] * 2), combined(before, [[0.5] * 3] * 2), strict=True)]
    assert fits.fit(found, grads).unexplained
    fit = fits.fit(found, grads, previous=before)
    assert not fit.unexplained
    assert [list(row) for row in fit.previous] == [pytest.approx([0.5] * 3, abs=1e-3)] * 2


def test_ranks_with_one_and_the_same_data_are_undetermined_but_their_sum_is_not() -> None:
    grads = window(1, 1, 9) * 2
    fit = fits.fit(combined(grads, [[1.0], [1.0]]), grads)
    assert fit.deficient
    assert all(math.isnan(c) for row in fit.coefficients for c in row)
    assert [list(row) for row in fit.shortest] == [pytest.approx([1.0], abs=1e-3)] * 2
    assert not fit.unexplained


def test_a_micro_batch_that_made_no_gradient_has_no_coefficient_and_hides_no_other() -> None:
    grads = window(2, 2, 11)
    nothing: list[Tensor | None] = [None] * len(SHAPES)
    fit = fits.fit(combined(grads, [[0.5, 0.0], [0.5, 0.5]]), [[grads[0][0], nothing], grads[1]])
    assert math.isnan(fit.coefficients[0][1])
    assert [fit.coefficients[0][0], *fit.coefficients[1]] == pytest.approx([0.5] * 3, abs=1e-3)


def test_fewer_elements_than_gradients_leave_coefficients_undetermined() -> None:
    grads = [[[torch.tensor([float(k), 1.0 + rank])] for k in range(3)] for rank in range(2)]
    fit = fits.fit([torch.tensor([1.0, 2.0])], grads)
    assert fit.deficient
    assert all(math.isnan(c) for row in fit.coefficients for c in row)


def test_no_gradient_at_all_is_absent_and_an_empty_piece_is_not() -> None:
    grads = window(1, 2, 1)
    assert fits.fit([None] * 3, grads).absent
    empty = [[[torch.zeros(0)], [torch.zeros(0)]]]
    fit = fits.fit([torch.zeros(0)], empty)
    assert fit.deficient
    assert not fit.absent


def test_a_large_gradient_is_sampled_by_its_seed_and_leaves_the_global_generator_alone() -> None:
    grads = window(2, 2, 13)
    found = combined(grads, [[0.5, 1.0], [0.25, 2.0]])
    before = torch.random.get_rng_state()
    fit = fits.fit(found, grads, sampled_up_to=150, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert fit == fits.fit(found, grads, sampled_up_to=150, seed=1)
    assert [list(row) for row in fit.coefficients] == [pytest.approx(row, abs=1e-3) for row in ([0.5, 1.0], [0.25, 2.0])]


def test_pieces_that_do_not_match_are_refused() -> None:
    grads = window(1, 1, 1)
    with pytest.raises(TrueStepError, match="of 4 elements, found 217"):
        fits.fit([torch.zeros(4), torch.zeros(5), torch.zeros(132)], grads)
    with pytest.raises(TrueStepError, match="of 1 params in each micro-batch, found 3"):
        fits.fit([torch.zeros(217)], grads)
    with pytest.raises(TrueStepError, match="at least one local gradient"):
        fits.fit([torch.zeros(1)], [[]])
