"""A probe leaves no trace: not in generators, defaults, hooks or on the terminal; and none of them changes what it finds."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from truestep.optimizers.probe import cache, probe


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure anew, whatever is remembered on this machine."""
    monkeypatch.setenv("TRUESTEP_CACHE", "off")
    cache.forget()


class Loud(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        print("stepping")
        warnings.warn("stepping", stacklevel=1)
        random.random()
        torch.randn(2)
        return super().step(closure)


def test_generators_defaults_hooks_and_the_terminal_are_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    fired: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *args: fired.append(args))
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state())
    threads = torch.get_num_threads()
    try:
        with torch.no_grad():
            probe(Loud, params="1d")
            assert not torch.is_grad_enabled()
    finally:
        handle.remove()
    after = torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert (torch.get_default_dtype(), torch.get_num_threads(), fired) == (torch.float32, threads, [])
    assert capfd.readouterr() == ("", "")


def test_the_same_is_found_under_other_defaults() -> None:
    usual = probe(torch.optim.NAdam, params="1d")
    cache.forget()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            assert probe(torch.optim.NAdam, params="1d") == usual
    finally:
        torch.set_default_dtype(torch.float32)
