"""Who may run where follows from scope, traits and what a backend hands over, and from no name."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from truestep.backends.base import BACKENDS
from truestep.optimizers import placement
from truestep.optimizers.placement import GIVES_ZEROS, HANDED, caveat, predicted
from truestep.optimizers.probe import Probe
from truestep.words.scope import Scope

ELEMENT = Probe("a.Class", scope="element")
WHOLE, PIECES = ("single", "ddp", "zero0"), ("fsdp1", "zero1", "zero2", "zero3")


def test_every_backend_hands_something_over():
    assert set(HANDED) == set(BACKENDS)
    assert {name for name in BACKENDS if "zero" in name} < GIVES_ZEROS


@pytest.mark.parametrize("scope", [scope.value for scope in Scope])
@pytest.mark.parametrize("backend", HANDED)
def test_the_table_of_the_architecture(backend, scope):
    outcome = predicted(dataclasses.replace(ELEMENT, scope=scope), backend).outcome
    if HANDED[backend] == "whole":
        assert outcome == "exact"
    elif HANDED[backend] == "dtensor":
        assert outcome == "exact or raises"
    else:
        assert outcome == ("exact" if scope == "element" else "ends elsewhere")


@pytest.mark.parametrize("backend", PIECES)
def test_pieces_are_handed_over_as_1d_tensors(backend):
    assert predicted(dataclasses.replace(ELEMENT, shape_sensitive=True), backend).outcome == "ends elsewhere"


@pytest.mark.parametrize("backend", WHOLE)
def test_whole_tensors_keep_their_shape(backend):
    assert predicted(dataclasses.replace(ELEMENT, shape_sensitive=True), backend).outcome == "exact"


@pytest.mark.parametrize("backend", HANDED)
def test_what_draws_is_random_and_what_cannot_run_is_not_run(backend):
    assert predicted(dataclasses.replace(ELEMENT, draws=True), backend).outcome == "random"
    assert predicted(dataclasses.replace(ELEMENT, needs=("closure",)), backend).outcome == "not run"
    unchecked = predicted(dataclasses.replace(ELEMENT, checked=False, why="it raises"), backend)
    assert (unchecked.outcome, "it raises" in unchecked.why) == ("not run", True)


def test_zeros_for_absent_gradients_are_warned_of_where_they_are_given():
    sensitive = dataclasses.replace(ELEMENT, none_sensitive=True)
    assert {backend for backend in HANDED if caveat(sensitive, backend)} == GIVES_ZEROS
    assert not any(caveat(ELEMENT, backend) for backend in HANDED)


def test_no_class_is_named():
    source = inspect.getsource(placement)
    assert not [name for name in ("adam", "muon", "adagrad", "sgd", "lion", "shampoo") if name in source.lower()]
