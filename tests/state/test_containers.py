"""Containers of state survive being flattened to key paths: kinds, keys as they are, lengths, and nothing shared."""

from __future__ import annotations

from collections import OrderedDict, deque

import pytest
import torch

from truestep.state.containers import by_path, nested
from truestep.state.view import slots_of
from truestep.words.layout import Shard


def flattened(state):
    slots = [slot for key, value in state.items() for slot in slots_of("w", key, value, place)]
    flat = {slot.key: slot.local[0] if slot.kind == "tensor" else slot.value for slot in slots}
    return flat, {slot.key: slot.within for slot in slots if slot.within}


def place(tensor):
    return Shard.replica(tuple(tensor.shape)), (tensor,)


a, b = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    "value",
    [
        a,
        3,
        (0.9, 0.99),
        [a, b],
        (a, None, 2),
        deque([a, b], maxlen=2),
        {0.0: a, 0.9: b},
        {"L": {1: [a, {"x": (b, a)}]}, "name/with/slashes": a},
        {},
        [],
    ],
    ids=str,
)
def test_what_is_flattened_comes_back(value):
    flat, within = flattened({"kept": value, "step": 1})
    back = nested(flat, within)
    assert list(back) == ["kept", "step"]
    assert type(back["kept"]) is type(value)
    assert getattr(back["kept"], "maxlen", None) == getattr(value, "maxlen", None)
    assert repr(back["kept"]) == repr(value)
    for mine, theirs in zip(flattened(back)[0].values(), flat.values(), strict=True):
        assert not isinstance(mine, torch.Tensor) or mine.data_ptr() != theirs.data_ptr()


def test_other_mappings_come_back_as_dicts():
    flat, within = flattened({"kept": OrderedDict(q=a)})
    assert type(nested(flat, within)["kept"]) is dict


def test_paths_alone_tell_lists_from_dicts():
    flat = {"Q/0": 1, "Q/1": 2, "L/x/0": 3, "L/y": 4, "R/1": 5, "step": 6}
    assert nested(flat, by_path(flat)) == {"Q": [1, 2], "L": {"x": [3], "y": 4}, "R": {"1": 5}, "step": 6}
