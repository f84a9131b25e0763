"""Scopes: how wide they are, and what contains what."""

from __future__ import annotations

import itertools

import pytest

from truestep.words.scope import Scope, widest


def contains(wide: Scope, narrow: Scope) -> bool:
    return wide is narrow or wide.width > narrow.width


@pytest.mark.parametrize("scopes", list(itertools.product(Scope, repeat=2)), ids=str)
def test_the_widest_contains_each_and_nothing_narrower_does(scopes):
    found = widest(list(scopes))
    assert all(contains(found, scope) for scope in scopes)
    narrower = [scope for scope in Scope if scope.width < found.width]
    assert not any(all(contains(other, scope) for scope in scopes) for other in narrower)


def test_a_row_and_a_column_make_a_tensor_unless_something_is_wider():
    assert widest([Scope.ROW, Scope.COLUMN]) is Scope.TENSOR
    assert widest([Scope.COLUMN, Scope.MODEL, Scope.ROW]) is Scope.MODEL
    assert widest([Scope.ROW, Scope.ELEMENT]) is Scope.ROW


def test_of_no_scope_the_widest_is_an_element():
    assert widest([]) is Scope.ELEMENT


def test_every_scope_has_a_width():
    assert sorted(scope.width for scope in Scope) == [0, 1, 1, 2, 3, 4]
