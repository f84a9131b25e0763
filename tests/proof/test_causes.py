"""Every cause is named from the gradient that its fault makes, and the table keeps its promises."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from truestep.proof import causes
from truestep.proof.causes import CAUSES, RIGHT, cause
from truestep.proof.fit import Fit, fit
from truestep.words.errors import TrueStepError

Table = list[list[float]]
Window = list[list[list[Tensor]]]


def window(n_ranks: int, n_micros: int, seed: int) -> Window:
    generator = torch.Generator().manual_seed(seed)
    return [
        [[torch.randn(shape, generator=generator) for shape in ((17, 9), (13,))] for _ in range(n_micros)] for _ in range(n_ranks)
    ]


def combined(grads: Window, coefficients: Table) -> list[Tensor]:
    pairs = [(c, micro) for of_rank, row in zip(grads, coefficients, strict=True) for micro, c in zip(of_rank, row, strict=True)]
    return [sum(c * parts.double() for c, parts in ((c, micro[place]) for c, micro in pairs)).float() for place in range(2)]


def of(found: Table, expected: Table, rank: int = 0, seed: int = 0) -> causes.Cause | None:
    grads = window(len(found), len(found[0]), seed)
    return cause(fit(combined(grads, found), grads), expected, rank)


def mean(n_ranks: int, n_micros: int, times: float = 1.0) -> Table:
    return [[times / (n_ranks * n_micros)] * n_micros for _ in range(n_ranks)]


def picked(n_ranks: int, n_micros: int, kept: list[int], times: float = 1.0) -> Table:
    return [[value if k in kept else 0.0 for k, value in enumerate(row)] for row in mean(n_ranks, n_micros, times)]


# slug, coefficients found, coefficients expected, words in the text
PLANTED: list[tuple[str, Table, Table, str]] = [
    ("summed-over-ranks", mean(2, 4, 2), mean(2, 4), "times 2: summed over the 2 ranks"),
    ("summed-over-ranks", mean(3, 1, 3), mean(3, 1), "times 3"),
    ("not-divided-by-micro-batches", mean(2, 4, 4), mean(2, 4), "not divided by the 4 micro-batches"),
    ("not-divided-by-micro-batches", mean(1, 2, 2), mean(1, 2), "not divided by the 2 micro-batches"),
    (
        "summed-or-not-divided",
        mean(2, 2, 2),
        mean(2, 2),
        "summed over the 2 ranks instead of averaged, or not divided by the 2 micro-batches",
    ),
    ("summed-and-not-divided", mean(2, 4, 8), mean(2, 4), "times 8"),
    ("divided-by-micro-batches-twice", mean(2, 4, 1 / 4), mean(2, 4), "1/4 of it: divided by the 4 micro-batches twice"),
    ("divided-by-ranks-twice", mean(2, 4, 1 / 2), mean(2, 4), "1/2 of it: divided by the 2 ranks twice"),
    ("divided-twice", mean(2, 2, 1 / 2), mean(2, 2), "by the 2 ranks, or by the 2 micro-batches"),
    ("divided-by-both-twice", mean(2, 4, 1 / 8), mean(2, 4), "1/8 of it"),
    ("last-micro-batch-only", picked(2, 4, [3]), mean(2, 4), "the 3 before it are lost"),
    ("last-micro-batch-only", picked(2, 4, [3], 4), mean(2, 4), "lost, times 4"),
    ("last-micro-batch-only", picked(1, 2, [1]), mean(1, 2), "the last micro-batch alone"),
    ("first-micro-batch-only", picked(2, 4, [0]), mean(2, 4), "the step ran before the window was complete"),
    ("last-micro-batches-only", picked(2, 4, [2, 3]), mean(2, 4), "the last 2 of 4 micro-batches alone"),
    ("first-micro-batches-only", picked(3, 4, [0, 1, 2]), mean(3, 4), "the first 3 of 4 micro-batches alone"),
    ("one-micro-batch-only", picked(2, 4, [1]), mean(2, 4), "micro-batch 2 of 4 alone"),
    ("not-reduced", [[0.25] * 4, [0.0] * 4], mean(2, 4), "only rank 0's own gradients: they were never reduced over the 2 ranks"),
    ("not-reduced", [[1.0], [0.0], [0.0]], mean(3, 1), "the 3 ranks"),
    ("some-ranks-only", [[0.25] * 4, [0.25] * 4, [0.0] * 4], mean(3, 4), "nothing of rank 2 is in it"),
    ("some-ranks-only", [[0.0], [0.5]], mean(2, 1), "nothing of rank 0 is in it"),
    ("micro-batch-lost", [[0.125, 0.0, 0.125, 0.125], [0.125] * 4], mean(2, 4), "lost: micro-batch 2 of rank 0"),
    ("micro-batch-lost", picked(2, 4, [0, 2, 3]), mean(2, 4), "micro-batch 2 of rank 0, micro-batch 2 of rank 1"),
    ("micro-batch-doubled", [[0.125, 0.25, 0.125, 0.125], [0.125] * 4], mean(2, 4), "counted twice: micro-batch 2 of rank 0"),
    ("scaled", mean(2, 4, 0.37), mean(2, 4), "all of it times 0.37"),
    ("scaled", mean(1, 1, 5.0), mean(1, 1), "all of it times 5"),
    ("mean-of-means", mean(2, 2), [[0.1, 0.2], [0.3, 0.4]], "a mean of means"),
    ("mean-of-ranks", [[1 / 6, 1 / 3], [3 / 14, 2 / 7]], [[0.1, 0.2], [0.3, 0.4]], "a mean of the ranks' means"),
    ("weighted-otherwise", [[0.1, 0.2], [0.3, 0.4]], mean(2, 2), "rank 0: 0.4, 0.8; rank 1: 1.2, 1.6"),
    ("zeroed", mean(2, 4, 0.0), mean(2, 4), "all of it was zero"),
]


@pytest.mark.parametrize(("slug", "found", "expected", "words"), PLANTED)
def test_a_planted_fault_is_named(slug: str, found: Table, expected: Table, words: str) -> None:
    named = of(found, expected)
    assert named is not None
    assert named.slug == slug
    assert words in named.text
    assert named.fix.endswith(".")


@pytest.mark.parametrize(("n_ranks", "n_micros"), [(1, 1), (2, 1), (1, 4), (2, 2), (3, 4)])
def test_a_right_gradient_has_no_cause(n_ranks: int, n_micros: int) -> None:
    assert of(mean(n_ranks, n_micros), mean(n_ranks, n_micros)) is None


def test_uneven_weights_that_were_kept_have_no_cause() -> None:
    assert of([[0.1, 0.2], [0.3, 0.4]], [[0.1, 0.2], [0.3, 0.4]]) is None


def test_a_loop_that_scaled_its_losses_is_told_what_these_count_in_the_end() -> None:
    grads = window(2, 2, 1)  # as they are after each rank divided by its own items: 0.3 and 0.7 of all
    weights, expected = [[0.1, 0.2], [0.3, 0.4]], [[0.3, 0.3], [0.7, 0.7]]
    named = cause(fit(combined(grads, [[0.5] * 2] * 2), grads), expected, 0, weights)
    assert named is not None
    assert named.slug == "mean-of-ranks"


def test_each_rank_that_never_reduced_is_told_as_itself() -> None:
    named = of([[0.0] * 4, [0.25] * 4], mean(2, 4), rank=1)
    assert named is not None
    assert named.slug == "not-reduced"
    assert "rank 1's own" in named.text


@pytest.mark.parametrize(("kept", "words"), [(1.0, "still holds the previous window's"), (0.0, "is the previous window's alone")])
def test_an_older_window_is_named(kept: float, words: str) -> None:
    grads, before = window(2, 4, 1), window(2, 4, 2)
    parts = zip(combined(grads, mean(2, 4, kept)), combined(before, mean(2, 4)), strict=True)
    named = cause(fit([now + then for now, then in parts], grads, previous=before), mean(2, 4), 0)
    assert named is not None
    assert named.slug == "older-window"
    assert words in named.text


def test_what_is_no_combination_is_named_with_what_is_left_over() -> None:
    grads = window(2, 2, 1)
    named = cause(
        fit([torch.randn(part.shape, generator=torch.Generator().manual_seed(5)) for part in grads[0][0]], grads), mean(2, 2), 0
    )
    assert named is not None
    assert named.slug == "unexplained"
    assert "no combination of this window's local gradients" in named.text
    assert "%" in named.text


def test_a_gradient_that_never_arrived_is_absent() -> None:
    named = cause(fit([None, None], window(2, 2, 1)), mean(2, 2), 0)
    assert named is not None
    assert named.slug == "absent"


def test_ranks_that_were_given_the_same_data_still_tell_a_sum_from_a_mean() -> None:
    grads: Window = window(1, 4, 1) * 2
    assert cause(fit(combined(grads, mean(2, 4)), grads), mean(2, 4), 0) is None
    named = cause(fit(combined(grads, mean(2, 4, 2)), grads), mean(2, 4), 0)
    assert named is not None
    assert named.slug == "summed-over-ranks"


def test_gradients_too_much_alike_are_said_to_be_so() -> None:
    grads: Window = [window(1, 1, 1)[0] * 4]
    named = cause(fit(combined(grads, [[0.0, 0.1, 0.2, 0.0]]), grads), [[0.1, 0.2, 0.3, 0.4]], 0)
    assert named is not None
    assert named.slug == "undetermined"


def test_every_row_of_the_table_is_planted_above_and_has_a_name_of_its_own() -> None:
    elsewhere = {"absent", "older-window", "unexplained", "undetermined", RIGHT}
    slugs = [row.slug for row in CAUSES]
    assert len(set(slugs)) == len(slugs)
    assert set(slugs) == {slug for slug, *_ in PLANTED} | elsewhere


def test_layouts_that_do_not_match_are_refused() -> None:
    with pytest.raises(TrueStepError, match=r"\[1\] micro-batches a rank, found \[2\]"):
        cause(Fit(((math.nan,),), ((0.0,),)), [[1.0, 1.0]], 0)
