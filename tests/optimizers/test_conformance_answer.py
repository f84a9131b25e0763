"""Where an optimizer may run: rehearsed on DTensors, stepped on flat shards, and said in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mutants import PlainAdamW
from torch import Tensor

from truestep.backends import rehearsal
from truestep.optimizers.conformance.answer import Answer, answered, line_of
from truestep.optimizers.conformance.subject import subject_of
from truestep.optimizers.probe.probing import probe
from truestep.optimizers.probe.quiet import quiet


def answer(optimizer: Any, **settings: Any) -> Answer:
    known = probe(optimizer, **settings)
    with quiet():
        return answered(subject_of(optimizer, None, settings), known)


class BelowDTensor(PlainAdamW):
    """It scales a row by its own norm, on the local tensor: below the DTensor, which does not notice."""

    def direction(self, param: Tensor, grad: Tensor, group: Any) -> Tensor:
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        return grad / local.norm()


def test_an_element_wise_class_is_exact_everywhere_but_where_zero_hands_over_zeros() -> None:
    fsdp2, fsdp1, zero = answer(torch.optim.AdamW).places
    assert [one.verdict for one in (fsdp2, fsdp1, zero)] == ["exact", "exact", "exact"]
    assert "rehearsed on 2 simulated ranks" in fsdp2.told
    assert "ZeRO gives a param without gradient zeros" in zero.told
    assert "every param gets a gradient" in zero.instead


def test_a_class_that_dtensor_cannot_run_raises_at_the_operation_and_line() -> None:
    fsdp2, fsdp1, zero = answer(torch.optim.Adafactor).places
    assert fsdp2.verdict == "raises"
    assert "in aten." in fsdp2.told
    assert "at torch/optim/_adafactor.py:" in fsdp2.told
    assert fsdp1.verdict == zero.verdict == "elsewhere"
    assert "without a word" in fsdp1.told
    assert "DDP" in fsdp1.instead


def test_a_fused_kernel_without_a_sharding_rule_is_named() -> None:
    fsdp2 = answer(torch.optim.Adagrad, fused=True).places[0]
    assert fsdp2.verdict == "raises"
    assert "aten._fused_adagrad_" in fsdp2.told


def test_a_class_that_goes_below_the_dtensor_ends_elsewhere_and_is_seen() -> None:
    fsdp2, fsdp1, _ = answer(BelowDTensor).places
    assert fsdp2.verdict == "elsewhere"
    assert fsdp1.verdict == "elsewhere"


def decayed_matrices(named: Any) -> torch.optim.Optimizer:
    parts = [([p for _, p in named if p.ndim > 1], 0.1), ([p for _, p in named if p.ndim <= 1], 0.0)]
    return torch.optim.SGD([{"params": params, "weight_decay": decay} for params, decay in parts], lr=0.1)


def test_a_function_that_chooses_by_shape_chooses_before_zero_shards_and_after_fsdp1_does() -> None:
    fsdp2, fsdp1, zero = answer(decayed_matrices).places
    assert [one.verdict for one in (fsdp2, fsdp1, zero)] == ["exact", "elsewhere", "exact"]
    assert "each group's params in one tensor" in zero.told


def test_several_optimizers_are_not_tried_on_an_engine() -> None:
    def two(named: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([param]) for _, param in named]

    zero = answer(two).places[2]
    assert zero.verdict == "not tried"
    assert "an engine takes one optimizer" in zero.told


def test_what_takes_sparse_gradients_only_is_not_tried_and_says_why() -> None:
    places = answer(torch.optim.SparseAdam).places
    assert {place.verdict for place in places} == {"not tried"}
    assert "sparse gradients only" in places[0].told


def test_beside_a_process_group_nothing_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal.dist, "is_initialized", lambda: True)
    fsdp2 = answer(torch.optim.SGD).places[0]
    assert fsdp2.verdict == "not tried"
    assert "predicted" in fsdp2.told
    assert "a process group is running" in fsdp2.told


def test_a_rehearsal_leaves_no_process_group_even_if_it_raises() -> None:
    with pytest.raises(ValueError, match="in the middle"), rehearsal.stage(simulated=True):
        raise ValueError("in the middle")
    assert not torch.distributed.is_initialized()


def test_a_simulated_tensor_comes_back_whole_with_its_bits() -> None:
    tensor = torch.arange(35.0).view(7, 5) * 1.7
    with rehearsal.stage(simulated=True) as stage:
        back = stage.whole(stage.shard(tensor))
    assert torch.equal(back, tensor)


def test_the_line_is_the_innermost_one_of_an_optimizer() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError) as caught:
        torch.optim.Rprop([param]).step()
    assert line_of(caught.value).startswith("torch/optim/rprop.py:")
