"""Loaders behave as their users hope: short, empty, iterable only, raising, resumed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import truestep as ts
from truestep.words.errors import WindowError

K = 3


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Linear(3, 2)


def batch(index):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(index)) * 1.5**index


def loss_of(model, x):
    return model(x).square().mean()


def made(**settings):
    model = net()
    return model, ts.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), micro_batches=K, **settings)


def trained(acc, model, loader):
    lengths = []
    for window in acc.windows(loader):
        for x in window:
            window.backward(loss_of(model, x))
        window.step()
        lengths.append(window.micro_batches)
    return lengths


def by_hand(groups):
    """Train on whole batches: the mean over the micro-batches of each group, one process, plain torch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for group in groups:
        for x in group:
            (loss_of(model, x) * (1.0 / len(group))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize(
    ("loader", "lengths"),
    [
        ([batch(index) for index in range(7)], [3, 3, 1]),
        ([batch(index) for index in range(6)], [3, 3]),
        ([batch(index) for index in range(2)], [2]),
        ((batch(index) for index in range(4)), [3, 1]),
        ([], []),
        (iter(()), []),
    ],
    ids=["a tail", "no tail", "shorter than a window", "iterable only", "empty", "an empty iterator"],
)
def test_every_batch_is_used_once_and_a_tail_is_divided_by_its_own_length(loader, lengths):
    model, acc = made()
    assert trained(acc, model, loader) == lengths
    numbers = itertools.count()
    assert same(model, by_hand([[batch(next(numbers)) for _ in range(length)] for length in lengths]))


def test_a_dataloader_is_one_too():
    rows = torch.stack([batch(0)[0] * index for index in range(1, 11)])
    model, acc = made()
    assert trained(acc, model, torch.utils.data.DataLoader(rows, batch_size=2)) == [3, 2]


def test_batches_are_drawn_when_their_window_opens_and_no_sooner():
    drawn = []

    def loader():
        for index in range(7):
            drawn.append(index)
            yield batch(index)

    model, acc = made()
    seen = []
    for window in acc.windows(loader()):
        seen.append(len(drawn))
        for x in window:
            window.backward(loss_of(model, x))
        window.step()
    assert seen == [3, 6, 7]


def test_what_the_loader_raises_reaches_the_user_and_the_windows_before_it_stand():
    def loader():
        for index in range(4):
            yield batch(index)
        raise OSError("disk is gone")

    model, acc = made()
    with pytest.raises(OSError, match="disk is gone"):
        trained(acc, model, loader())
    assert same(model, by_hand([[batch(0), batch(1), batch(2)]]))
    assert trained(acc, model, [batch(0)]) == [1]


def test_what_num_items_raises_reaches_the_user():
    _, acc = made()
    with pytest.raises(ZeroDivisionError):
        next(acc.windows([batch(0)], lambda x: 1 // 0))


def test_a_loop_that_is_left_after_a_step_can_be_begun_again():
    model, acc = made()
    for window in acc.windows([batch(index) for index in range(9)]):
        for x in window:
            window.backward(loss_of(model, x))
        window.step()
        break
    assert trained(acc, model, [batch(3)]) == [1]
    assert same(model, by_hand([[batch(0), batch(1), batch(2)], [batch(3)]]))


def test_an_inner_loop_of_validation_changes_nothing():
    model, acc = made()
    for window in acc.windows([batch(index) for index in range(6)]):
        for x in window:
            window.backward(loss_of(model, x))
            with torch.no_grad():
                for held_out in [batch(20), batch(21)]:
                    model(held_out)
        window.step()
    assert same(model, by_hand([[batch(0), batch(1), batch(2)], [batch(3), batch(4), batch(5)]]))


# --- state


class Stateful:
    """A loader that keeps how far it is itself, as torchdata's does."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 9:
            self.place += 1
            yield batch(self.place - 1)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def stopped_after_two(loader):
    """Train two windows; return the states of model, optimizer, accumulator and loader."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    acc = ts.Accumulator(model, optimizer, micro_batches=K)
    for number, window in enumerate(acc.windows(loader)):
        for x in window:
            window.backward(loss_of(model, x))
        window.step()
        if number == 1:
            break
    return model.state_dict(), optimizer.state_dict(), acc.state_dict(), getattr(loader, "state_dict", dict)()


@pytest.mark.parametrize("make", [Stateful, lambda: [batch(index) for index in range(9)]], ids=["stateful", "plain"])
def test_a_run_that_is_resumed_uses_the_batches_that_are_left(make):
    of_model, of_optimizer, of_acc, of_loader = stopped_after_two(make())
    assert of_acc == {"schema_version": 1, "micro_batches": K, "windows": 2, "stepped": 2, "batches": 6}
    model, loader = net(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    acc = ts.Accumulator(model, optimizer, micro_batches=K)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    acc.load_state_dict(of_acc)
    if of_loader:
        loader.load_state_dict(of_loader)
    assert trained(acc, model, loader) == [3]
    assert same(model, by_hand([[batch(3 * number + index) for index in range(3)] for number in range(3)]))
    assert acc.state_dict() == {"schema_version": 1, "micro_batches": K, "windows": 3, "stepped": 3, "batches": 0}
    assert trained(acc, model, [batch(1)]) == [1]  # the next pass is a whole one


def test_its_state_is_plain_data_and_cannot_be_had_inside_a_window():
    model, acc = made()
    window = acc.open(1)
    with pytest.raises(WindowError, match="window/accumulating: expected .* Call window.backward"):
        acc.state_dict()
    window.backward(loss_of(model, batch(0)))
    with pytest.raises(WindowError, match=r"window/reduced: .* Call window.step\(\)"):
        acc.state_dict()
    window.step()
    assert acc.state_dict()["windows"] == 1


@pytest.mark.parametrize("state", [{}, {"schema_version": 2, "windows": 1, "stepped": 1, "batches": 3}, {"schema_version": 1}])
def test_what_is_no_state_is_refused(state):
    _, acc = made()
    with pytest.raises(WindowError, match="expected the state of an Accumulator with windows, stepped, batches, found .*Pass"):
        acc.load_state_dict(state)
