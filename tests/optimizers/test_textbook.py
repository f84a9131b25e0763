"""The textbook against torch: every rule, plain, foreach and fused, in every dtype, over drawn settings and several steps."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from truestep.optimizers import textbook
from truestep.optimizers.replica import replica
from truestep.proof import bounds
from truestep.words.errors import TrueStepError
from truestep.words.scope import Scope

SHAPES = ((37, 5), (131,), ())  # beyond a vector block, and no multiple of one
SCALES = (1.0, 1e-3, 30.0, 1e-6, 0.1)  # of the gradients, step by step

RATES = st.floats(1e-5, 0.5)
DECAYS = st.sampled_from([0.0, 0.0, 1e-3, 0.1])
BETAS = st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.9999))
EPS = st.sampled_from([1e-10, 1e-8, 1e-3])
FLAG = st.booleans()
COMMON = {"lr": RATES, "weight_decay": DECAYS, "maximize": FLAG}
SETTINGS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "SGD": {**COMMON, "momentum": st.sampled_from([0.0, 0.5, 0.97]), "dampening": st.sampled_from([0.0, 0.3]), "nesterov": FLAG},
    "Adagrad": {**COMMON, "lr_decay": st.floats(0, 1), "initial_accumulator_value": st.sampled_from([0.0, 0.1]), "eps": EPS},
    "RMSprop": {**COMMON, "alpha": st.floats(0.3, 0.999), "eps": EPS, "momentum": st.sampled_from([0.0, 0.9]), "centered": FLAG},
    "Adadelta": {**COMMON, "rho": st.floats(0.3, 0.99), "eps": EPS},
    "Adam": {**COMMON, "betas": BETAS, "eps": EPS, "amsgrad": FLAG, "decoupled_weight_decay": FLAG},
    "AdamW": {**COMMON, "betas": BETAS, "eps": EPS, "amsgrad": FLAG},
    "Adamax": {**COMMON, "betas": BETAS, "eps": EPS},
    "NAdam": {**COMMON, "betas": BETAS, "eps": EPS, "momentum_decay": st.floats(0, 0.1), "decoupled_weight_decay": FLAG},
    "RAdam": {**COMMON, "betas": BETAS, "eps": EPS, "decoupled_weight_decay": FLAG},
    "ASGD": {**COMMON, "lambd": st.floats(0, 0.3), "alpha": st.floats(0.3, 1), "t0": st.sampled_from([1.0, 3.0, 1e6])},
    "Rprop": {
        "lr": RATES,
        "maximize": FLAG,
        "etas": st.sampled_from([(0.5, 1.2), (0.3, 1.7)]),
        "step_sizes": st.sampled_from([(1e-6, 50.0), (1e-2, 0.1)]),
    },
    "Adafactor": {**COMMON, "beta2_decay": st.floats(-1, -0.3), "d": st.floats(1, 2)},
}
FUSED = {"SGD", "Adagrad", "Adam", "AdamW"}
FOREACH = set(SETTINGS)
CASES = [(name, kernel) for name in SETTINGS for kernel in ("plain", "foreach", "fused") if kernel != "fused" or name in FUSED]


def made(name: str, params: list[Tensor], kernel: str, chosen: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the torch optimizer with that kernel."""
    if chosen.get("nesterov"):  # torch wants these with it
        chosen = {**chosen, "momentum": chosen["momentum"] or 0.9, "dampening": 0.0}
    flags = {"foreach": kernel == "foreach", **({"fused": kernel == "fused"} if name in FUSED else {})}
    return getattr(torch.optim, name)(params, **chosen, **flags)


def params_of(dtype: torch.dtype, seed: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    """Return params of unlike shapes and values."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def judged(optimizer: torch.optim.Optimizer, steps: int, seed: int, scales: tuple[float, ...] = SCALES) -> dict[str, float]:
    """Step with gradients of changing scale; return for each key how far it was off at worst, in its bound."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    group = optimizer.param_groups[0]
    worst: dict[str, float] = {}
    for index in range(steps):
        for param in group["params"]:
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.grad = (noise * scales[index % len(scales)]).to(param.dtype)
        expected = [textbook.expected(optimizer, group, p, p.grad, optimizer.state.get(p)) for p in group["params"]]
        optimizer.step()
        for param, slots in zip(group["params"], expected, strict=True):
            found = {"param": param, **{key: value for key, value in optimizer.state[param].items() if value is not None}}
            assert set(slots) == set(found)
            for key, value in found.items():
                ratio = bounds.worst(torch.as_tensor(value), slots[key]).ratio
                worst[key] = max(worst.get(key, 0.0), ratio)
    return worst


@pytest.mark.parametrize(("name", "kernel"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_torch_steps_as_the_textbook_says(name: str, kernel: str, dtype: torch.dtype) -> None:
    @settings(max_examples=8)
    @given(st.fixed_dictionaries(SETTINGS[name]), st.integers(0, 10**6))
    def holds(chosen: dict[str, Any], seed: int) -> None:
        shapes = SHAPES if name != "Adafactor" else ((37, 5), (131,), (3, 7, 11))
        worst = judged(made(name, params_of(dtype, seed, shapes), kernel, chosen), 5, seed)
        assert max(worst.values()) <= 1, worst

    holds()


@pytest.mark.parametrize(("name", "kernel"), [case for case in CASES if case[0] != "Adafactor"])
def test_in_bfloat16_too_but_for_the_fused_sgd_that_skips_vector_blocks(name: str, kernel: str) -> None:
    # https://github.com/pytorch/pytorch/issues/191763: on the CPU it writes the scalar tail alone
    chosen = {"weight_decay": 0.1, **({"momentum": 0.9} if name == "SGD" else {})} if name != "Rprop" else {}
    worst = judged(made(name, params_of(torch.bfloat16, 3), kernel, chosen), 6, 3)
    assert (max(worst.values()) <= 1) == ((name, kernel) != ("SGD", "fused")), worst


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adamax", "ASGD", "Rprop"])
def test_in_float16_too_where_nothing_overflows(name: str) -> None:
    chosen = {"eps": 1e-2} if name in ("Adam", "Adamax") else {}
    worst = judged(made(name, params_of(torch.float16, 4), "plain", chosen), 4, 4, scales=(1.0, 0.3, 3.0))
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("name", ["Adam", "NAdam", "Adagrad", "RMSprop", "ASGD", "Adafactor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_a_learning_rate_in_a_tensor_is_taken_for_what_it_is(name: str, dtype: torch.dtype) -> None:
    optimizer = made(name, params_of(dtype, 5), "plain", {"lr": torch.tensor(0.037), "weight_decay": 0.1})
    assert max(judged(optimizer, 4, 5).values()) <= 1


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "Adagrad", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_differentiable_steps_make_their_corrections_in_tensors(name: str, dtype: torch.dtype) -> None:
    optimizer = getattr(torch.optim, name)(params_of(dtype, 6), differentiable=True)
    assert max(judged(optimizer, 4, 6).values()) <= 1


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "Rprop", "RMSprop", "ASGD"])
def test_complex_params_count_as_pairs_of_numbers(name: str) -> None:
    param = torch.randn(11, 3, generator=torch.Generator().manual_seed(7), dtype=torch.complex64)
    optimizer = getattr(torch.optim, name)([param], foreach=False)
    for scale in (1.0, 0.01, 10.0):
        param.grad = torch.randn(11, 3, generator=torch.Generator().manual_seed(8), dtype=torch.complex64) * scale
        expected = textbook.expected(optimizer, optimizer.param_groups[0], param, param.grad, optimizer.state.get(param))
        optimizer.step()
        assert expected["param"].value.shape == (11, 3, 2)
        for key, slot in expected.items():
            found = torch.as_tensor(param if key == "param" else optimizer.state[param][key])
            found = torch.view_as_real(found) if found.is_complex() else found
            assert bounds.worst(found, slot).ratio <= 1


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_in_float64_throughout_is_the_textbooks(nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", lambda tensor: tensor.clone())  # its iteration then runs in the param's dtype
    for shape, adjust in (((19, 7), None), ((5, 23), "match_rms_adamw")):
        (param,) = params_of(torch.float64, 9, (shape,))
        optimizer = torch.optim.Muon([param], nesterov=nesterov, adjust_lr_fn=adjust)
        for index, scale in enumerate(SCALES):
            param.grad = params_of(torch.float64, 20 + index, (shape,))[0] * scale
            expected = textbook.expected(optimizer, optimizer.param_groups[0], param, param.grad, optimizer.state.get(param))
            optimizer.step()
            assert bounds.worst(optimizer.state[param]["momentum_buffer"], expected["momentum_buffer"]).ratio <= 1
            assert bool(expected["param"].bound.isinf().all())  # element by element nothing is claimed
            # Five iterations, each a product of three matrices that stretches by less than 3.5 + 4.8 + 2.1.
            slack = bounds.gamma(5 * 3 * max(shape), 2.0**-53) * 10.4**5
            assert float((param - expected["param"].value).norm()) <= slack * optimizer.param_groups[0]["lr"] * math.sqrt(
                max(shape)
            )


def test_torchs_muon_divides_a_bfloat16_buffer_in_place_without_nesterov() -> None:
    # .bfloat16() of what is bfloat16 already is no copy, and the normalisation that follows is in place.
    (param,) = params_of(torch.bfloat16, 10, ((7, 5),))
    optimizer = torch.optim.Muon([param], nesterov=False)
    param.grad = params_of(torch.bfloat16, 11, ((7, 5),))[0]
    expected = textbook.expected(optimizer, optimizer.param_groups[0], param, param.grad)
    optimizer.step()
    buffer = optimizer.state[param]["momentum_buffer"]
    assert bounds.worst(buffer, expected["momentum_buffer"]).ratio > 1
    assert float(buffer.to(torch.float64).norm()) == pytest.approx(1.0, abs=2.0**-6)


def test_nothing_given_is_changed() -> None:
    params = params_of(torch.float64, 12)
    optimizer = torch.optim.AdamW(params, amsgrad=True)
    judged(optimizer, 2, 12)
    group, param = optimizer.param_groups[0], params[0]
    before = copy.deepcopy((param, param.grad, optimizer.state[param], {k: v for k, v in group.items() if k != "params"}))
    slots = textbook.expected(optimizer, group, param, param.grad, optimizer.state[param])
    for slot in slots.values():
        slot.value.fill_(7)  # memory of its own
    after = (param, param.grad, optimizer.state[param], {k: v for k, v in group.items() if k != "params"})
    assert repr(before) == repr(after)
    assert torch.equal(before[0], param)


def test_without_a_gradient_nothing_moves() -> None:
    (param,) = params_of(torch.float32, 13, ((3, 4),))
    slots = textbook.expected("adamw", {"weight_decay": 0.5}, param, None, {"step": torch.tensor(3.0), "exp_avg": param * 2})
    assert set(slots) == {"param", "step", "exp_avg"}
    assert torch.equal(slots["param"].value, param.to(torch.float64))
    assert all(not bool(slot.bound.any()) for slot in slots.values())


def test_a_counter_in_the_group_is_read_and_one_may_be_given() -> None:
    param, grad = params_of(torch.float64, 14, ((6,), (6,)))
    group = {"lr": 0.1, "step": 4}
    in_group = textbook.expected("adam", group, param, grad)["param"].value
    given_ = textbook.expected("adam", {"lr": 0.1}, param, grad, step=4)["param"].value
    first = textbook.expected("adam", {"lr": 0.1}, param, grad)["param"].value
    assert torch.equal(in_group, given_)
    assert not torch.equal(in_group, first)


def test_a_sparse_gradient_counts_as_a_dense_one() -> None:
    param = torch.nn.Embedding(7, 3, sparse=True)
    optimizer = torch.optim.Adagrad(param.parameters())
    param(torch.tensor([1, 4, 4])).square().sum().backward()
    weight = param.weight
    slots = textbook.expected(optimizer, optimizer.param_groups[0], weight, weight.grad, optimizer.state[weight])
    with torch.sparse.check_sparse_tensor_invariants(True):  # torch warns where nobody chose
        optimizer.step()
    assert bounds.worst(weight, slots["param"]).ratio <= 1
    assert bounds.worst(optimizer.state[weight]["sum"], slots["sum"]).ratio <= 1


def test_the_rule_of_a_class_of_its_object_and_of_its_replica_is_the_same_and_a_subclass_has_none() -> None:
    class Mine(torch.optim.AdamW):
        pass

    (param,) = params_of(torch.float32, 15, ((4,),))
    optimizer = torch.optim.AdamW([param])
    adamw = textbook.rule("AdamW")
    twin = replica(optimizer, {param: param.clone()})
    assert [textbook.rule_of(each) for each in (torch.optim.AdamW, optimizer, twin, type(twin))] == [adamw] * 4
    assert textbook.rule_of(Mine) is None
    assert textbook.rule_of(torch.optim.LBFGS) is None
    assert textbook.rule_of(torch.optim.SparseAdam) is None


def test_every_rule_names_its_source_and_its_defaults_are_torchs() -> None:
    assert textbook.references() == sorted(textbook.RULES)
    assert len(textbook.RULES) == 15
    for name, rule in textbook.RULES.items():
        assert rule.name == name
        assert len(rule.source) > 40
        cls = next((getattr(torch.optim, each) for each in torch.optim.__all__ if each.lower() == name), None)
        assert rule.scope is (Scope.TENSOR if name in ("adafactor", "muon", "lamb") else Scope.ELEMENT)
        if cls is not None:
            defaults = cls([torch.zeros(2, 2)]).defaults
            assert {key: defaults[key] for key in rule.defaults} == dict(rule.defaults)
            assert textbook.rule_of(cls) is rule


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: textbook.rule("adamv"), "found 'adamv'. Choose one of adadelta, adafactor"),
        (lambda: textbook.rule("sgd").hyper(beta=1), "found beta. Leave them out"),
        (lambda: textbook.expected(torch.optim.LBFGS, {}, torch.ones(2), torch.ones(2)), "found LBFGS. Name its rule"),
        (lambda: textbook.expected("sgd", {}, torch.ones(2), torch.ones(3)), r"shape \(2,\), found \(3,\)"),
        (lambda: textbook.expected("adam", {}, torch.ones(2), torch.ones(2), step=-1), "found -1.0"),
        (lambda: textbook.expected("muon", {}, torch.ones(2), torch.ones(2)), r"2 dims for muon, found shape \(2,\)"),
    ],
)
def test_bad_input_is_told_in_one_line(act: Any, message: str) -> None:
    with pytest.raises(TrueStepError, match=message):
        act()
