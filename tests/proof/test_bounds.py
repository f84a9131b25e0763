"""The bounds hold for every order of a healthy sum, and break on a planted fault."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from truestep.proof import bounds
from truestep.words.errors import TrueStepError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**20)


def made(n_ranks: int, n_micros: int, dtype: torch.dtype, seed: int, size: int = 57) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [(torch.randn(size, generator=generator) * 10.0 ** (rank - k)).to(dtype) for k in range(n_micros)]
        for rank in range(n_ranks)
    ]


def even(n_ranks: int, n_micros: int) -> list[list[float]]:
    return [[1.0 / n_ranks] * n_micros for _ in range(n_ranks)]


def summed(terms: list[Tensor], dtype: torch.dtype, order: torch.Generator) -> Tensor:
    """Add the terms up in `dtype`, two at a time, in a random tree."""
    left = [term.to(dtype) for term in terms]
    while len(left) > 1:
        i, j = torch.randperm(len(left), generator=order)[:2].tolist()
        both = left[i] + left[j]
        left = [term for place, term in enumerate(left) if place not in (i, j)] + [both]
    return left[0]


def reduced(grads: list[list[Tensor]], accumulate: torch.dtype, reduce: torch.dtype, seed: int) -> Tensor:
    order = torch.Generator().manual_seed(seed)
    by_rank = [summed(of_rank, accumulate, order) for of_rank in grads]
    return summed([total.to(reduce) / len(grads) for total in by_rank], reduce, order)


@pytest.mark.parametrize(
    ("dtype", "u", "subnormal"),
    [(torch.float32, 2**-24, 2**-149), (torch.bfloat16, 2**-8, 2**-133), (torch.float16, 2**-11, 2**-24)],
)
def test_roundoff_and_subnormal_are_those_of_the_format(dtype: torch.dtype, u: float, subnormal: float) -> None:
    assert bounds.unit_roundoff(dtype) == u
    assert bounds.smallest_subnormal(dtype) == subnormal


def test_gamma_is_n_u_over_one_minus_n_u_and_infinite_beyond() -> None:
    assert bounds.gamma(2, 0.125) == 0.25 / 0.75
    assert bounds.gamma(0, 0.5) == 0.0
    assert math.isinf(bounds.gamma(8, 0.125))


def test_a_bound_says_nothing_beyond_an_eighth() -> None:
    u = bounds.unit_roundoff(torch.bfloat16)
    assert not bounds.says_nothing(32, u)
    assert bounds.says_nothing(33, u)
    assert bounds.says_nothing(64, u)


def test_the_bound_of_one_small_sum_is_the_number_computed_by_hand() -> None:
    grads = [[torch.tensor([1.0, 0.0]), torch.tensor([-3.0, 0.0])]]
    expected = bounds.reduction_bound(grads, [[0.5, 0.25]], accumulate_dtype=torch.float32, reduce_dtype=torch.float32)
    u, subnormal = 2**-24, 2**-149
    stage_k, stage_w = 3 * u / (1 - 3 * u), 2 * u / (1 - 2 * u)
    assert expected.value.tolist() == [0.5 - 0.75, 0.0]
    assert expected.bound[0].item() == pytest.approx((stage_k + stage_w + stage_k * stage_w) * 1.25, rel=1e-7)
    assert expected.bound[1].item() == 5 * subnormal  # K + W + 2


@given(st.integers(1, 4), st.integers(1, 5), dtypes, dtypes, seeds)
@settings(max_examples=120, deadline=None)
def test_a_healthy_reduction_in_any_order_obeys_the_bound(
    n_ranks: int, n_micros: int, accumulate: torch.dtype, reduce: torch.dtype, seed: int
) -> None:
    grads = made(n_ranks, n_micros, accumulate, seed)
    expected = bounds.reduction_bound(grads, even(n_ranks, n_micros), accumulate_dtype=accumulate, reduce_dtype=reduce)
    assert bounds.worst(reduced(grads, accumulate, reduce, seed), expected).ratio <= 1


@given(st.integers(2, 4), st.integers(2, 4), st.sampled_from([torch.float32, torch.bfloat16]), seeds)
@settings(max_examples=60, deadline=None)
def test_a_lost_doubled_or_unaveraged_gradient_breaks_the_bound(
    n_ranks: int, n_micros: int, dtype: torch.dtype, seed: int
) -> None:
    grads = made(n_ranks, n_micros, dtype, seed)
    expected = bounds.reduction_bound(grads, even(n_ranks, n_micros), accumulate_dtype=dtype, reduce_dtype=dtype)
    lost = [[micro if place else torch.zeros_like(micro) for place, micro in enumerate(of_rank)] for of_rank in grads]
    doubled = [[micro if place else micro * 2 for place, micro in enumerate(of_rank)] for of_rank in grads]
    for broken in (reduced(lost, dtype, dtype, seed), reduced(doubled, dtype, dtype, seed)):
        assert bounds.worst(broken, expected).ratio > 1
    assert bounds.worst(reduced(grads, dtype, dtype, seed) * n_ranks, expected).ratio > 1


@given(st.integers(1, 3), seeds)
@settings(max_examples=30, deadline=None)
def test_one_wrong_element_among_thousands_is_the_worst(n_ranks: int, seed: int) -> None:
    grads = [[micro.reshape(43, 71) for micro in of_rank] for of_rank in made(n_ranks, 2, torch.float32, seed, size=43 * 71)]
    found = reduced(grads, torch.float32, torch.float32, seed)
    row, column = seed % 43, seed % 71
    found[row, column] += grads[0][0].abs().max()
    expected = bounds.reduction_bound(grads, even(n_ranks, 2), accumulate_dtype=torch.float32, reduce_dtype=torch.float32)
    worst = bounds.worst(found, expected)
    assert worst.ratio > 1
    assert worst.index == (row, column)
    assert worst.found == found[row, column].item()


@given(st.integers(34, 70), seeds)
@settings(max_examples=10, deadline=None)
def test_a_long_bf16_window_is_judged_by_its_replay(n_micros: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = [[torch.randn(83, generator=generator).bfloat16() for _ in range(n_micros)] for _ in range(2)]
    totals = []
    for of_rank in grads:
        buffer = of_rank[0].clone()
        for gradient in of_rank[1:]:
            buffer += gradient
        totals.append(buffer)
    replays = [[bounds.replayed(of_rank, torch.bfloat16)] for of_rank in grads]
    assert all(torch.equal(replay[0], total) for replay, total in zip(replays, totals, strict=True))
    expected = bounds.reduction_bound(replays, even(2, 1), accumulate_dtype=None, reduce_dtype=torch.float32)
    assert bounds.worst((totals[0].float() + totals[1].float()) / 2, expected).ratio <= 1
    shorter = bounds.replayed(grads[0][:-1], torch.bfloat16)
    assert bounds.worst((shorter.float() + totals[1].float()) / 2, expected).ratio > 1


def test_a_replay_touches_none_of_what_it_adds() -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])
    assert bounds.replayed([first, second], torch.float32).tolist() == [1.5, 2.25]
    assert first.tolist() == [1.0, 2.0]


@given(seeds, st.floats(0.01, 0.9), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=40, deadline=None)
def test_a_clipped_gradient_is_judged_with_its_factor_and_extra_roundings(seed: int, max_norm: float, dtype: torch.dtype) -> None:
    grads = made(2, 3, dtype, seed)
    found = reduced(grads, dtype, dtype, seed)
    norm = torch.linalg.vector_norm(found)
    clipped = found * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    factor = bounds.clip_factor(max_norm, norm.item())
    coefficients = [[c * factor for c in row] for row in even(2, 3)]
    roundings = bounds.CLIP_ROUNDINGS
    expected = bounds.reduction_bound(grads, coefficients, accumulate_dtype=dtype, reduce_dtype=dtype, n_extra=roundings)
    assert bounds.worst(clipped, expected).ratio <= 1
    if norm > 2 * max_norm:
        assert bounds.worst(found, expected).ratio > 1


def test_not_finite_agrees_only_with_the_same() -> None:
    value = torch.tensor([math.nan, math.inf, 1.0, math.inf, 2.0], dtype=torch.float64)
    expected = bounds.Expected(value, torch.ones(5, dtype=torch.float64))
    agreeing = torch.tensor([math.nan, math.inf, 1.5, math.inf, 2.0])
    assert bounds.worst(agreeing, expected) == bounds.Worst(0.5, (2,), 1.5, 1.0)
    for place, value_there in [(0, 0.0), (1, -math.inf), (2, math.nan), (3, 5.0), (4, math.inf)]:
        apart = agreeing.clone()
        apart[place] = value_there
        worst = bounds.worst(apart, expected)
        assert math.isinf(worst.ratio)
        assert worst.index == (place,)


def test_where_nothing_may_differ_equal_is_zero_and_else_infinite() -> None:
    exact = bounds.Expected(torch.tensor([3.0, 0.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    assert bounds.worst(torch.tensor([3.0, 0.0]), exact).ratio == 0
    assert math.isinf(bounds.worst(torch.tensor([3.0, 1e-30]), exact).ratio)


def test_no_elements_and_no_dims_are_judged_too() -> None:
    empty = bounds.Expected(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, 4, dtype=torch.float64))
    assert bounds.worst(torch.zeros(0, 4), empty) == bounds.Worst(0.0, None, 0.0, 0.0)
    scalar = bounds.Expected(torch.tensor(2.0, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64))
    assert bounds.worst(torch.tensor(2.25), scalar) == bounds.Worst(0.5, (), 2.25, 2.0)


def test_a_sum_of_zeros_is_exact_however_wide_the_bound() -> None:
    grads = [[torch.zeros(3, dtype=torch.bfloat16)] * 300]
    expected = bounds.reduction_bound(grads, even(1, 300), accumulate_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    assert bounds.worst(torch.zeros(3), expected).ratio == 0
    assert bounds.worst(torch.full((3,), 1e-9), expected).ratio > 1


def test_shapes_and_lengths_that_do_not_match_are_refused() -> None:
    expected = bounds.Expected(torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(TrueStepError, match=r"shape \(2,\), found \(3,\)"):
        bounds.worst(torch.zeros(3), expected)
    with pytest.raises(TrueStepError, match="found 1 for 2"):
        bounds.reduction_bound([[torch.zeros(2)] * 2], [[1.0]], accumulate_dtype=torch.float32, reduce_dtype=torch.float32)
    with pytest.raises(TrueStepError, match="at least one"):
        bounds.reduction_bound([], [], accumulate_dtype=None, reduce_dtype=torch.float32)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.bfloat16]), seeds)
@settings(max_examples=60, deadline=None)
def test_a_norm_by_any_route_obeys_its_bound(sizes: list[int], dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = [(torch.randn(size, generator=generator) * 10.0 ** (-place)).to(dtype) for place, size in enumerate(sizes)]
    expected = bounds.norm_bound(grads, dtype=dtype, ranks=2)
    by_tensors = torch.nn.utils.get_total_norm(grads)
    flat = torch.cat(grads)[torch.randperm(sum(sizes), generator=generator)]
    one_by_one = torch.zeros((), dtype=dtype)
    for element in flat:
        one_by_one += element * element
    halves = torch.stack([torch.linalg.vector_norm(flat[::2]), torch.linalg.vector_norm(flat[1::2])])
    for found in (by_tensors, one_by_one.sqrt(), torch.linalg.vector_norm(halves)):
        assert bounds.worst(found, expected).ratio <= 1


def test_a_norm_that_forgot_a_tensor_or_a_rank_breaks_its_bound() -> None:
    grads = [torch.full((7,), 0.5), torch.full((3, 5), 0.25)]
    expected = bounds.norm_bound(grads, dtype=torch.float32)
    assert expected.value.item() == math.sqrt(7 * 0.25 + 15 * 0.0625)
    assert bounds.worst(torch.nn.utils.get_total_norm(grads), expected).ratio <= 1
    assert bounds.worst(torch.nn.utils.get_total_norm(grads[:1]), expected).ratio > 1
    assert bounds.worst(torch.nn.utils.get_total_norm(grads) * math.sqrt(2), expected).ratio > 1


def test_squares_that_underflow_stay_within_the_bound_of_the_norm() -> None:
    tiny = [torch.full((9,), 1e-25), torch.full((4,), 1e-30)]
    assert bounds.worst(torch.nn.utils.get_total_norm(tiny), bounds.norm_bound(tiny, dtype=torch.float32)).ratio <= 1
    flushed = torch.cat(tiny).square().sum().sqrt()
    assert flushed == 0
    assert bounds.worst(flushed, bounds.norm_bound(tiny, dtype=torch.float32)).ratio <= 1


@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 7.5, math.inf])
def test_the_clip_factor_is_torch_s_own(norm: float) -> None:
    gradient = torch.ones(1, dtype=torch.float64, requires_grad=True)
    gradient.grad = torch.ones(1, dtype=torch.float64)
    torch.nn.utils.clip_grads_with_norm_([gradient], 0.75, torch.tensor(norm, dtype=torch.float64))
    assert gradient.grad.item() == pytest.approx(bounds.clip_factor(0.75, norm), rel=1e-15)


def test_a_norm_that_is_no_number_makes_a_factor_that_is_none() -> None:
    assert math.isnan(bounds.clip_factor(1.0, math.nan))
