"""A number for later is the one that the tensor had when it was asked for."""

from __future__ import annotations

import math

import torch

from truestep.accumulate.later import Later


def test_it_is_read_as_it_was():
    tensor = torch.tensor(1.5)
    later = Later(tensor)
    tensor.zero_()
    assert later.read() == 1.5
    assert math.isnan(Later(torch.tensor(math.nan)).read())
