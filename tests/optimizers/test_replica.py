"""A replica steps as its original would, bit for bit, and leaves it alone."""

# size: one table of every torch.optim class, and what must hold for each
from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as hooks_of_torch

from truestep.optimizers.replica import left_out, replica
from truestep.words.errors import TrueStepError

SHAPES = [(8, 6), (5, 3), (2, 9)]
Make = Callable[[list[Any]], torch.optim.Optimizer]


def flags(cls: type[torch.optim.Optimizer], **settings: Any) -> Make:
    return lambda params: cls(params, **settings)


optim = torch.optim
ELEMENTWISE: dict[str, Make] = {
    "adadelta": flags(optim.Adadelta, lr=0.3, weight_decay=0.01),
    "adafactor": flags(optim.Adafactor, lr=0.02),
    "adagrad": flags(optim.Adagrad, lr=0.1, initial_accumulator_value=0.2, lr_decay=0.01),
    "adam-amsgrad": flags(optim.Adam, lr=0.05, amsgrad=True),
    "adamax": flags(optim.Adamax, lr=0.03),
    "adamw": flags(optim.AdamW, lr=0.02, weight_decay=0.1),
    "asgd": flags(optim.ASGD, lr=0.02, t0=1),
    "muon": flags(optim.Muon, lr=0.02),
    "nadam": flags(optim.NAdam, lr=0.02),
    "radam": flags(optim.RAdam, lr=0.02),
    "rmsprop": flags(optim.RMSprop, lr=0.01, centered=True, momentum=0.8),
    "rprop": flags(optim.Rprop, lr=0.01),
    "sgd": flags(optim.SGD, lr=0.1),
    "sgd-nesterov": flags(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}
KERNELS: dict[str, Make] = {
    **{
        f"{name}-foreach": (lambda params, make=ELEMENTWISE[name]: _with(make(params), foreach=True))
        for name in ("adadelta", "adam-amsgrad", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd-nesterov")
    },
    "adam-fused": flags(optim.Adam, lr=0.05, fused=True),
    "adamw-fused": flags(optim.AdamW, lr=0.02, fused=True, amsgrad=True),
    "adagrad-fused": flags(optim.Adagrad, lr=0.1, fused=True),
    "sgd-fused": flags(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adamw-tensor-lr": flags(optim.AdamW, lr=torch.tensor(0.02)),
    "adam-maximize": flags(optim.Adam, lr=0.03, maximize=True),
}
OPTIMIZERS = ELEMENTWISE | KERNELS


def _with(optimizer: torch.optim.Optimizer, **settings: Any) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group.update(settings)
    return optimizer


def made_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def give_gradients(params: list[Any], step: int) -> None:
    """Give each param a gradient whose scale changes from step to step."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype) * 10.0 ** (step % 3 - 1)


def flat(value: Any) -> list[Any]:
    """Return every tensor and number of a nest, in order."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in flat(inner)]
    if isinstance(value, (list, tuple)):
        return [leaf for inner in value for leaf in flat(inner)]
    return [value]


def contents(optimizer: torch.optim.Optimizer, params: list[Any]) -> list[Any]:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return [*params, *flat([optimizer.state.get(param, {}) for param in params]), *flat(groups)]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        (torch.equal(a, b) and a.dtype == b.dtype) if isinstance(a, Tensor) else a == b for a, b in zip(left, right, strict=True)
    )


def plain_of(params: list[nn.Parameter]) -> dict[Tensor, Tensor]:
    return {param: param.detach().clone() for param in params}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("warm_up", [0, 3])
def test_a_replica_steps_bitwise_like_its_original_which_it_leaves_untouched(name: str, warm_up: int) -> None:
    params = made_params()
    original = OPTIMIZERS[name](params)
    schedule = optim.lr_scheduler.ExponentialLR(original, 0.9)
    for step in range(warm_up):
        give_gradients(params, step)
        original.step()
        schedule.step()
    before, n_entries = copy.deepcopy(contents(original, params)), len(original.state)

    plain = plain_of(params)
    stepping = replica(original, plain)
    assert isinstance(stepping, type(original))
    assert len(original.state) == n_entries
    plains = list(plain.values())
    for step in range(warm_up, warm_up + 3):
        give_gradients(plains, step)
        stepping.step()
    assert same(contents(original, params), before)

    for step in range(warm_up, warm_up + 3):
        give_gradients(params, step)
        original.step()
    assert same(contents(stepping, plains), contents(original, params))


def test_every_optimizer_of_torch_is_tested_here() -> None:
    of_torch = {
        name
        for name, cls in vars(optim).items()
        if isinstance(cls, type) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer
    }
    tested = {type(make(made_params())).__name__ for make in OPTIMIZERS.values()} | {"SparseAdam", "LBFGS"}
    assert of_torch == tested


def test_one_step_of_adagrad_is_the_number_computed_by_hand() -> None:
    param = nn.Parameter(torch.tensor([1.0, -2.0]))
    original = optim.Adagrad([param], lr=0.5, initial_accumulator_value=0.75)
    plain = param.detach().clone()
    stepping = replica(original, {param: plain})
    plain.grad = torch.tensor([0.5, 0.0])
    stepping.step()
    # sum = 0.75 + 0.5^2 = 1; 1 - 0.5 * 0.5 / sqrt(1) = 0.75
    assert stepping.state[plain]["sum"].tolist() == [1.0, 0.75]
    assert plain.tolist() == pytest.approx([0.75, -2.0], rel=1e-6)
    assert original.state[param]["sum"].tolist() == [0.75, 0.75]
    assert param.tolist() == [1.0, -2.0]


def test_nothing_of_a_replica_lies_in_the_original_s_memory() -> None:
    params = made_params()
    original = optim.Adam(params, lr=torch.tensor(0.1), amsgrad=True)
    give_gradients(params, 0)
    original.step()
    plain = plain_of(params)
    stepping = replica(original, plain)
    mine = {leaf.untyped_storage().data_ptr() for leaf in contents(original, params) if isinstance(leaf, Tensor)}
    theirs = {leaf.untyped_storage().data_ptr() for leaf in contents(stepping, list(plain.values())) if isinstance(leaf, Tensor)}
    assert not mine & theirs
    assert stepping.param_groups is not original.param_groups
    assert stepping.param_groups[0] is not original.param_groups[0]


def test_sparse_adam_steps_bitwise_like_its_original() -> None:
    param = nn.Parameter(torch.arange(20.0).reshape(5, 4))
    original = optim.SparseAdam([param], lr=0.1)
    plain = param.detach().clone()
    stepping = replica(original, {param: plain})
    for step in range(3):
        values = torch.full((2, 4), 0.5 * 10.0**step)
        for tensor in (param, plain):
            tensor.grad = torch.sparse_coo_tensor(torch.tensor([[0, 3]]), values.clone(), (5, 4), check_invariants=True)
    stepping.step()
    original.step()
    assert same(contents(stepping, [plain]), contents(original, [param]))


def test_l_bfgs_steps_bitwise_like_its_original_through_its_closure() -> None:
    params = made_params()
    original = optim.LBFGS(params, lr=0.5, history_size=3, line_search_fn="strong_wolfe")

    def closure_of(optimizer: torch.optim.Optimizer, tensors: list[Any]) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = sum((tensor * tensor).cos().sum() for tensor in tensors)
            loss.backward()
            return loss

        return closure

    original.step(closure_of(original, params))
    plain: dict[Tensor, Tensor] = {param: nn.Parameter(param.detach().clone()) for param in params}
    stepping, plains = replica(original, plain), list(plain.values())
    before = [param.detach().clone() for param in params]
    for _ in range(2):
        stepping.step(closure_of(stepping, plains))
    assert same(before, [param.detach() for param in params])
    for _ in range(2):
        original.step(closure_of(original, params))
    assert same(contents(stepping, plains), contents(original, params))


def test_neither_own_nor_global_hooks_nor_the_schedule_s_patch_fire_for_a_replica() -> None:
    fired: list[Any] = []
    params = made_params()
    original = optim.SGD(params, lr=0.1, momentum=0.9)
    original.register_step_pre_hook(lambda optimizer, *_: fired.append(optimizer))
    optim.lr_scheduler.StepLR(original, 5)
    handles = [
        hooks_of_torch.register_optimizer_step_pre_hook(lambda optimizer, *_: fired.append(optimizer)),
        hooks_of_torch.register_optimizer_step_post_hook(lambda optimizer, *_: fired.append(optimizer)),
    ]
    try:
        plain = plain_of(params)
        stepping = replica(original, plain)
        assert "step" not in vars(stepping)
        give_gradients(list(plain.values()), 0)
        stepping.step()
        assert fired == []
        give_gradients(params, 0)
        original.step()
        assert fired == [original] * 3
    finally:
        for handle in handles:
            handle.remove()


def test_a_replica_may_be_stepped_from_inside_a_global_hook() -> None:
    params = made_params()
    original = optim.SGD(params, lr=0.1)
    calls = []

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        calls.append(optimizer)
        plain = plain_of(params)
        give_gradients(list(plain.values()), 0)
        replica(optimizer, plain).step()

    handles = [hooks_of_torch.register_optimizer_step_post_hook(hook) for _ in range(2)]
    try:
        original.step()
        original.step()
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [original] * 4


def test_hooks_come_back_after_a_step_that_raised() -> None:
    params = made_params()
    original = optim.SGD(params, lr=0.1)
    plain = plain_of(params)
    stepping = replica(original, plain)
    handle = hooks_of_torch.register_optimizer_step_pre_hook(lambda *_: None)
    try:

        def closure() -> float:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            stepping.step(closure)
        assert handle.id in hooks_of_torch._global_optimizer_pre_hooks
    finally:
        handle.remove()


class Signed(optim.SGD):
    """Steps through its parent's step, by the sign of the gradient; keeps state in places of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.5)
        self.state["all"] = {"norms": [torch.zeros(()), 0.5]}
        self.param_groups[0]["k"] = 0
        self.by_hand = self._signed
        self.guard = threading.Lock()
        self.mixed = {"lock": self.guard, "scale": torch.ones(3)}

    def _signed(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad = param.grad.sign() * self.mixed["scale"][0]

    def step(self, closure: Any = None) -> None:
        self.by_hand()
        self.param_groups[0]["k"] += 1
        self.state["all"]["norms"][0] += 1
        self.mixed["scale"] *= 0.5
        return super().step(closure)


def test_state_kept_anywhere_is_copied_and_what_cannot_be_copied_is_shared() -> None:
    params = made_params()
    original = Signed(params, lr=0.25)
    plain = plain_of(params)
    stepping: Any = replica(original, plain)
    handle = hooks_of_torch.register_optimizer_step_pre_hook(lambda *_: pytest.fail("a global hook fired through super().step()"))
    try:
        give_gradients(list(plain.values()), 0)
        stepping.step()
    finally:
        handle.remove()
    assert stepping.param_groups[0]["k"] == 1
    assert original.param_groups[0]["k"] == 0
    assert stepping.state["all"]["norms"][0] == 1
    assert original.state["all"]["norms"][0] == 0
    assert stepping.guard is original.guard
    assert original.mixed["scale"].tolist() == [1.0, 1.0, 1.0]
    assert stepping.mixed["scale"].tolist() == [0.5, 0.5, 0.5]
    give_gradients(params, 0)
    original.step()
    assert same(contents(stepping, list(plain.values())), contents(original, params))


class Looking(optim.Optimizer):
    """Holds another optimizer inside, as Lookahead does, and shows its groups as its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}
        self.inner = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = defaultdict(dict)
        self.every = 2
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["slow"] = param.detach().clone()
            group["counter"] = 0

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for group in self.param_groups:
            group["counter"] += 1
            if group["counter"] % self.every == 0:
                for param in group["params"]:
                    slow = self.state[param]["slow"].lerp_(param.detach(), 0.5)
                    param.data.copy_(slow)


def test_an_optimizer_inside_an_optimizer_is_replicated_with_the_groups_they_share() -> None:
    params = made_params()
    original = Looking(optim.AdamW(params, lr=0.1))
    for step in range(2):
        give_gradients(params, step)
        original.step()
    plain = plain_of(params)
    stepping: Any = replica(original, plain)
    assert stepping.inner is not original.inner
    assert stepping.param_groups is stepping.inner.param_groups
    plains = list(plain.values())
    for step in range(2, 5):
        give_gradients(plains, step)
        stepping.step()
        give_gradients(params, step)
        original.step()
    assert same(contents(stepping, plains), contents(original, params))
    assert same(contents(stepping.inner, plains), contents(original.inner, params))


def test_given_state_takes_the_place_of_the_original_s_and_is_copied() -> None:
    params = made_params()
    original = optim.AdamW(params, lr=0.1)
    give_gradients(params, 0)
    original.step()
    first = params[0]
    given = {first: {"step": torch.tensor(7.0), "exp_avg": torch.ones(8, 6), "exp_avg_sq": torch.full((8, 6), 2.0)}}
    plain = plain_of(params)
    stepping = replica(original, plain, state_by_param=given)
    assert list(stepping.state) == [plain[first]]
    give_gradients(list(plain.values()), 1)
    stepping.step()
    assert stepping.state[plain[first]]["step"] == 8
    assert stepping.state[plain[params[1]]]["step"] == 1
    assert given[first]["exp_avg"].eq(1).all()
    assert original.state[first]["step"] == 1


def test_without_state_a_replica_begins_anew() -> None:
    params = made_params()
    original = optim.AdamW(params, lr=0.1)
    give_gradients(params, 0)
    original.step()
    assert len(replica(original, plain_of(params), with_state=False).state) == 0
    assert len(original.state) == 3


def test_a_replica_on_shards_steps_as_the_whole_does() -> None:
    params = made_params()
    original = optim.Adagrad(params, lr=0.1)
    for step in range(2):
        give_gradients(params, step)
        original.step()
    first = params[0]
    state = {first: {"step": original.state[first]["step"], "sum": original.state[first]["sum"][2:5]}}
    plain = first.detach()[2:5].clone()
    stepping = replica(original, {first: plain}, state_by_param=state)
    give_gradients(params, 2)
    assert first.grad is not None
    plain.grad = first.grad[2:5].clone()
    stepping.step()
    original.step()
    assert torch.equal(plain, first.detach()[2:5])
    assert torch.equal(stepping.state[plain]["sum"], original.state[first]["sum"][2:5])
    assert stepping.state[plain]["sum"].untyped_storage().nbytes() == 3 * 6 * 4


def test_params_without_a_plain_tensor_stay_out_and_are_told() -> None:
    params = made_params()
    named = [(f"layer.{place}", param) for place, param in enumerate(params)]
    original = optim.Adagrad([{"params": named[:2]}, {"params": named[2:], "lr": 0.5}])
    dead = torch.zeros(4)
    original.state[dead] = {"sum": torch.ones(4)}
    plain = plain_of(params[1:])
    assert [id(tensor) for tensor in left_out(original, plain)] == [id(params[0]), id(dead)]
    stepping = replica(original, plain)
    assert [len(group["params"]) for group in stepping.param_groups] == [1, 1]
    assert stepping.param_groups[0]["param_names"] == ["layer.1"]
    assert set(map(id, stepping.state)) == set(map(id, plain.values()))
    assert len(original.state) == 4


def test_plain_kernels_switch_foreach_and_fused_off_in_the_replica_only() -> None:
    params = made_params()
    original = optim.AdamW(params, lr=0.1, fused=True)
    stepping = replica(original, plain_of(params), plain_kernels=True)
    assert [stepping.param_groups[0][flag] for flag in ("foreach", "fused")] == [False, False]
    assert [stepping.defaults[flag] for flag in ("foreach", "fused")] == [False, False]
    assert original.param_groups[0]["fused"]


def test_a_replica_of_a_replica_works_and_each_is_freed_when_dropped() -> None:
    params = made_params()
    plain = plain_of(params)
    first = replica(optim.AdamW(params, lr=0.1), plain)
    second = replica(first, {tensor: tensor.clone() for tensor in plain.values()})
    assert type(second) is type(first)
    gc.collect()
    gc.disable()
    try:
        dropped = weakref.ref(second)
        del second
        assert dropped() is None
    finally:
        gc.enable()


def test_tensors_that_share_memory_still_do_in_the_replica() -> None:
    params = made_params()
    original: Any = optim.SGD(params, lr=0.1)
    original.buffer = torch.zeros(10)
    original.state[params[0]]["part"] = original.buffer[2:5]
    plain = plain_of(params)
    stepping: Any = replica(original, plain)
    stepping.state[plain[params[0]]]["part"] += 1
    assert stepping.buffer.tolist() == [0.0] * 2 + [1.0] * 3 + [0.0] * 5
    assert original.buffer.eq(0).all()


def test_generators_are_copied_so_that_both_draw_the_same() -> None:
    params = made_params()
    original: Any = optim.SGD(params, lr=0.1)
    original.generator = torch.Generator().manual_seed(11)
    torch.rand(3, generator=original.generator)
    stepping: Any = replica(original, plain_of(params))
    assert torch.equal(torch.rand(5, generator=stepping.generator), torch.rand(5, generator=original.generator))


def test_maps_that_fit_no_param_or_two_of_them_are_refused() -> None:
    params = made_params()
    original = optim.SGD(params, lr=0.1)
    with pytest.raises(TrueStepError, match="the 3 params that SGD holds, found none"):
        replica(original, plain_of(made_params()))
    one = torch.zeros(2)
    with pytest.raises(TrueStepError, match="stands for several"):
        replica(original, {params[0]: one, params[1]: one})
