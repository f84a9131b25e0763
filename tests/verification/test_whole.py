"""Slots of all ranks make whole ones, and what does not fit together is told of by rank."""

from __future__ import annotations

import torch

from truestep.state.view import Slot, StateView
from truestep.verification.whole import replica_findings, wholes
from truestep.words.layout import Layout, Shard
from truestep.words.shards import Box


def replica(tensor):
    return Slot("w", "kept", "tensor", Shard.replica(tuple(tensor.shape)), (tensor,))


def piece(shape, *boxes):
    return Slot(
        "w", "kept", "tensor", Shard(Layout.FLAT, shape, tuple(box for box, _ in boxes)), tuple(local for _, local in boxes)
    )


def whole(*slots):
    found = wholes([StateView([slot]) for slot in slots])
    assert len(replica_findings(found)) == len(found.apart)
    return found.values.get(("w", "kept")), found.apart.get(("w", "kept"))


def test_pieces_are_put_together():
    rows = piece((2, 2), (Box((0, 0), (1, 2)), torch.ones(1, 2))), piece((2, 2), (Box((1, 0), (2, 2)), torch.zeros(1, 2)))
    value, apart = whole(*rows)
    assert value.tolist() == [[1, 1], [0, 0]]
    assert apart is None


def test_a_rank_that_holds_nothing_has_no_say_in_the_shape():
    value, apart = whole(piece(()), replica(torch.ones(1)))
    assert (value.tolist(), apart) == ([1], None)


def test_ranks_that_differ_are_told():
    assert whole(replica(torch.ones(2)), replica(torch.ones(2)), replica(torch.zeros(2)))[1] == (2,)
    assert whole(replica(torch.ones(1)), replica(torch.tensor(1.0)))[1] == (1,)
    assert whole(replica(torch.ones(2)), replica(torch.ones(2, dtype=torch.float64)))[1] == (1,)
    number = Slot("w", "kept", "value", Shard.replica(()), value=1.0)
    assert whole(replica(torch.tensor(1.0)), number)[1] == (1,)
    assert whole(number, replica(torch.tensor(1.0)))[1] == (1,)
