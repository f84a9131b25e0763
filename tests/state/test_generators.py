"""Random generators: kept and put back, all of those that a forward may draw from."""

from __future__ import annotations

import random

import numpy
import torch

from truestep.state.generators import restore_rng, rng_states


def draws():
    return torch.rand(3).tolist(), random.random(), numpy.random.rand(2).tolist()


def test_what_was_drawn_is_drawn_again():
    states = rng_states()
    first = draws()
    assert draws() != first
    restore_rng(states)
    assert draws() == first


def test_reading_draws_nothing():
    states = rng_states()
    rng_states()
    first = draws()
    restore_rng(states)
    assert draws() == first
