"""The operand bound: it holds for any formula in any order, and no wrong rule is within it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from truestep.optimizers import textbook
from truestep.optimizers.textbook import Arithmetic, Operand, operand
from truestep.proof import bounds
from truestep.proof.bounds import Expected

NUMBERS = st.floats(-1e3, 1e3, width=16) | st.sampled_from([0.0, 1.0, -1.0, 1e-3, 6e-5])
# Two operands, and what is done with them; on float tensors of any dtype and on Operand alike.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "square": lambda x, y: x * x,
    "scaled": lambda x, y: 0.3 * x,
    "shifted": lambda x, y: x + 1e-3,
    "over": lambda x, y: x / 0.7,
    "from": lambda x, y: 0.1 - x,
    "maximum": lambda x, y: _maximum(x, y),
    "root": lambda x, y: _sqrt(_maximum(x, -x)),
    "lerp": lambda x, y: operand.mix(x, y, 0.3) if isinstance(x, Operand) else x.lerp(y, 0.3),
    "heavy lerp": lambda x, y: operand.mix(x, y, 0.9) if isinstance(x, Operand) else x.lerp(y, 0.9),
    "decay": lambda x, y: operand.mix(x, y, 0.1) if isinstance(x, Operand) else x * 0.9 + y * 0.1,
    "sign": lambda x, y: operand.sign(x) if isinstance(x, Operand) else x.sign(),
}


def _maximum(x: Any, y: Any) -> Any:
    return operand.maximum(x, y) if isinstance(x, Operand) else torch.maximum(x, y)


def _sqrt(x: Any) -> Any:
    return operand.sqrt(x) if isinstance(x, Operand) else x.sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_chain_of_operations_stays_within_its_bound(dtype: torch.dtype) -> None:
    @settings(max_examples=150)
    @given(
        st.lists(NUMBERS, min_size=3, max_size=3),
        st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=9),
    )
    def holds(numbers: list[float], chain: list[tuple[str, int, int]]) -> None:
        kernel = [torch.tensor([number]).to(dtype) for number in numbers]
        exact = [Arithmetic.of(dtype).exact(number.to(torch.float64)) for number in kernel]
        for name, first, second in chain:
            place, other = first % len(kernel), second % len(kernel)
            kernel.append(OPERATIONS[name](kernel[place], kernel[other]))
            exact.append(OPERATIONS[name](exact[place], exact[other]))
            found = kernel[-1].to(torch.float64)
            sure = exact[-1].bound.isfinite() & found.isfinite()  # an overflow is no rounding
            error = (found - exact[-1].value).abs()
            assert bool((error[sure] <= exact[-1].bound[sure]).all()), (name, found, exact[-1])

    holds()


def test_a_cancelled_sum_carries_its_error_on_and_ulps_of_the_result_do_not() -> None:
    x = torch.tensor([1 / 3], dtype=torch.float32)
    kernel = (x + 1e6) - 1e6  # 0.34375
    exact = Arithmetic.of(torch.float32).exact(x.to(torch.float64))
    rule = (exact + 1e6) - 1e6
    assert float((kernel - x).abs()) > 100_000 * float(x) * 2.0**-24
    assert float((kernel - x).abs()) <= float(rule.bound) < 1
    through = 1 / rule
    assert float((1 / kernel - 1 / x).abs()) <= float(through.bound)


def test_at_a_sign_either_branch_is_right_only_within_the_bound() -> None:
    arithmetic = Arithmetic.of(torch.float32)
    x = arithmetic.exact(torch.tensor([1.0, 1.0 + 1e-3], dtype=torch.float64)) * 0.1 - 0.1
    signs = operand.sign(x)
    assert signs.bound[0] >= 1  # 0 by the rule; a kernel may have 1 or -1
    assert signs.bound[1] == pytest.approx(0, abs=1e-5)
    assert operand.sign(arithmetic.exact(torch.zeros(1, dtype=torch.float64))).bound == 0


def test_what_divides_by_a_number_that_may_be_zero_is_not_bounded() -> None:
    x = Arithmetic.of(torch.float32).exact(torch.tensor([1.0, 3.0], dtype=torch.float64)) / 3 - 1 / 3
    assert (1 / x).bound.isinf().tolist() == [True, False]


def test_a_scalar_of_pythons_is_rounded_once_when_it_meets_a_tensor() -> None:
    t = Arithmetic.of(torch.float64, scalar=True).exact(1.0)
    correction = 1 - 0.999**t
    in_tensors = 1 - 0.999 ** Arithmetic.of(torch.float32, scalar=True).exact(1.0)
    x = Arithmetic.of(torch.float32).exact(torch.tensor([2.0], dtype=torch.float64))
    assert (x / correction).roundings == 2
    assert float((x / correction).bound) < 1e-3 * 3 * 2.0**-24 * 2e6 * 1.01
    assert float((x / in_tensors).bound) > 100 * float((x / correction).bound)


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "dampening": 0.1, "nesterov": True},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "adafactor": {"eps": (1e-7, 1e-3)},
    "lion": {"decoupled_weight_decay": True},
}


@pytest.mark.parametrize("name", sorted(textbook.RULES))
def test_the_roundings_that_are_counted_are_never_fewer_than_those_of_the_kernels(name: str) -> None:
    rule = textbook.rule(name)
    given_ = {"weight_decay": 0.1, "decoupled_weight_decay": False, **SETTINGS.get(name, {})}
    hyper = rule.hyper(**{key: value for key, value in given_.items() if key in rule.defaults})
    tensors, scalars = Arithmetic.of(torch.float32), Arithmetic.of(torch.float64, scalar=True)
    param = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    start = rule.init(param, hyper) or {"momentum_buffer": param}
    state = {key: (tensors if isinstance(value, Tensor) else scalars).exact(value) for key, value in start.items()}
    new, new_state = rule.step(tensors.exact(param), tensors.exact(param + 1), state, hyper, scalars.exact(9.0))
    longest = max([new.roundings, *(value.roundings for key, value in new_state.items() if key != "step")])
    assert longest >= rule.roundings
    if name in ("sgd", "adagrad", "adadelta", "adam", "adamw", "adamax", "radam", "rprop", "rmsprop"):
        assert longest == rule.roundings  # counted by hand, and by the operands


# -- a param that begins at zero, and noise: moments cancel, and so does the param


def noisy(name: str, steps: int) -> tuple[dict[str, float], int]:
    """Step torch's class from zero with noise; return the worst ratio by key, and the most ulps of the param itself."""
    generator = torch.Generator().manual_seed(11)
    param = torch.zeros(257)
    optimizer = getattr(torch.optim, name)([param], lr=0.01, **({"momentum": 0.9} if name == "SGD" else {}))
    worst: dict[str, float] = {}
    ulps = 0
    for _ in range(steps):
        param.grad = torch.randn(257, generator=generator)
        expected = textbook.expected(optimizer, optimizer.param_groups[0], param, param.grad, optimizer.state.get(param))
        optimizer.step()
        for key, slot in expected.items():
            found = param if key == "param" else torch.as_tensor(optimizer.state[param][key])
            worst[key] = max(worst.get(key, 0.0), bounds.worst(found, slot).ratio)
        value = expected["param"].value
        ulps = max(ulps, int(((param - value).abs() / (value.abs() * 2.0**-23)).nan_to_num(0.0, 0.0, 0.0).max()))
    return worst, ulps


ELEMENTWISE = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop"]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_param_from_zero_with_noise_passes_for_200_steps_and_the_bound_is_not_vacuous(name: str) -> None:
    worst, _ = noisy(name, 200)
    assert max(worst.values()) <= 1, worst
    assert worst["param"] > 1e-3


def test_there_ulps_of_the_result_would_be_hundreds() -> None:
    assert noisy("Adam", 200)[1] > 100


# -- wrong rules


def adamw(param: Tensor, grad: Tensor, state: dict[str, Tensor], t: int, wrong: str) -> None:
    """Step AdamW in float32, right or wrong in one way; lr 0.01, eps 1e-3, decay 0.1."""
    lr, beta1, beta2, eps, decay = 0.01, 0.9, 0.999, 1e-3, 0.1
    shift = 1 if wrong == "bias correction off by one" else 0
    if wrong == "coupled decay":
        grad = grad + decay * param
    elif wrong != "no decay":
        param.mul_(1 - lr * decay)
    m, v = state["exp_avg"], state["exp_avg_sq"]
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad.abs() if wrong == "signed square" else grad, value=1 - beta2)
    v_hat = v / (1 - beta2 ** (t + shift))
    denominator = (v_hat + eps).sqrt() if wrong == "eps inside the root" else v_hat.sqrt() + eps
    if wrong == "second moment in bfloat16":
        v.copy_(v.bfloat16())
    param.addcdiv_(m, denominator, value=-lr / (1 - beta1 ** (t + shift)))


WRONG = ["eps inside the root", "coupled decay", "no decay", "bias correction off by one", "second moment in bfloat16"]


@pytest.mark.parametrize("wrong", ["", *WRONG])
def test_a_wrong_rule_is_outside_the_bound_and_the_right_one_within(wrong: str) -> None:
    generator = torch.Generator().manual_seed(5)
    param = torch.randn(64, generator=generator)
    group = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.1}
    state = {"exp_avg": torch.zeros(64), "exp_avg_sq": torch.zeros(64)}
    ratios: list[float] = []
    for t in range(1, 6):
        grad = torch.randn(64, generator=generator) * (1.0, 0.01, 10.0)[t % 3]
        expected = textbook.expected("adamw", group, param, grad, state, step=t - 1)
        adamw(param, grad, state, t, wrong)
        found = {"param": param, **state}
        ratios += [bounds.worst(found[key], expected[key]).ratio for key in found]
    assert (max(ratios) > 10) if wrong else (max(ratios) <= 1)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("SGD", {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.01}),
        ("SGD", {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9}),
        ("Adagrad", {"eps": 1e-10}, {"eps": 1e-4}),
        ("Adagrad", {}, {"lr_decay": 1e-3}),
        ("RMSprop", {}, {"centered": True}),
        ("Adadelta", {}, {"eps": 1e-5}),
        ("Adamax", {}, {"betas": (0.9, 0.99)}),
        ("NAdam", {}, {"momentum_decay": 8e-3}),
        ("RAdam", {"betas": (0.9, 0.95)}, {"betas": (0.9, 0.96)}),
        ("ASGD", {}, {"lambd": 2e-4}),
        ("Rprop", {}, {"etas": (0.5, 1.21)}),
        ("Adafactor", {}, {"d": 1.05}),
    ],
)
def test_a_setting_that_is_slightly_off_is_outside_the_bound(name: str, right: dict[str, Any], wrong: dict[str, Any]) -> None:
    worst = {}
    for chosen in (right, wrong):
        generator = torch.Generator().manual_seed(6)
        param = torch.randn(33, generator=generator)
        optimizer = getattr(torch.optim, name)([param], **chosen)
        group = {**optimizer.param_groups[0], **getattr(torch.optim, name)([param], **right).defaults}
        ratio = 0.0
        for scale in (1.0, 0.01, 3.0, 0.5, 2.0, 0.1, 1.0, 0.3):
            param.grad = torch.randn(33, generator=generator) * scale
            expected = textbook.expected(optimizer, group, param, param.grad, optimizer.state.get(param))
            optimizer.step()
            ratio = max(ratio, bounds.worst(param, expected["param"]).ratio)
        worst[str(chosen)] = ratio
    assert worst[str(right)] <= 1 < worst[str(wrong)], worst


# -- what torch has no class for: plain references, written as their papers' code is


def lion(param: Tensor, grad: Tensor, m: Tensor, *, lr: float, betas: tuple[float, float], decay: float) -> None:
    """Step Lion as its authors' code does."""
    param.mul_(1 - lr * decay)
    update = m.clone().mul_(betas[0]).add(grad, alpha=1 - betas[0]).sign_()
    param.add_(update, alpha=-lr)
    m.mul_(betas[1]).add_(grad, alpha=1 - betas[1])


def lamb(param: Tensor, grad: Tensor, m: Tensor, v: Tensor, t: int, *, lr: float, decay: float) -> None:
    """Step LAMB, algorithm 2 line by line."""
    m.mul_(0.9).add_(grad, alpha=0.1)
    v.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
    r = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6)
    r = r + decay * param
    weight_norm, norm = float(param.norm()), float(r.norm())
    param.sub_(r, alpha=lr * (weight_norm / norm if weight_norm > 0 and norm > 0 else 1.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("from_zero", [False, True])
def test_lion_and_lamb_are_as_plain_references_have_them(dtype: torch.dtype, decay: float, from_zero: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    params = [torch.randn(23, 11, generator=generator, dtype=torch.float64).to(dtype) * (0 if from_zero else 1) for _ in "ab"]
    m, lamb_m, v = (torch.zeros(23, 11, dtype=dtype) for _ in "abc")
    lion_group = {"lr": 0.02, "betas": (0.9, 0.99), "weight_decay": decay}
    lamb_group = {"lr": 0.02, "weight_decay": decay}
    for t in range(1, 61):
        grad = (torch.randn(23, 11, generator=generator, dtype=torch.float64) * (1.0, 1e-3, 30.0)[t % 3]).to(dtype)
        by_lion = textbook.expected("lion", lion_group, params[0], grad, {"exp_avg": m})
        by_lamb = textbook.expected("lamb", lamb_group, params[1], grad, {"exp_avg": lamb_m, "exp_avg_sq": v}, step=t - 1)
        lion(params[0], grad, m, lr=0.02, betas=(0.9, 0.99), decay=decay)
        lamb(params[1], grad, lamb_m, v, t, lr=0.02, decay=decay)
        pairs = [(params[0], by_lion["param"]), (m, by_lion["exp_avg"])]
        pairs += [(params[1], by_lamb["param"]), (lamb_m, by_lamb["exp_avg"]), (v, by_lamb["exp_avg_sq"])]
        assert all(bounds.worst(found, slot).ratio <= 1 for found, slot in pairs)


def test_lions_sign_is_free_only_where_the_moment_cancels() -> None:
    param, m = torch.zeros(2), torch.tensor([-1.0, -1.0])
    grad = torch.tensor([9.0, 9.1])  # 0.9 * -1 + 0.1 * 9 = 0
    slot = textbook.expected("lion", {"lr": 1.0}, param, grad, {"exp_avg": m})["param"]
    assert [within(slot, index, value) for index in (0, 1) for value in (-1.0, 0.0, 1.0)] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]


def within(slot: Expected, index: int, value: float) -> bool:
    """Tell whether a value of one element is within the bound."""
    return math.fabs(value - float(slot.value[index])) <= float(slot.bound[index])
