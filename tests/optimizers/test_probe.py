"""A probe sees what is planted: how far an update looks, what it draws, keeps and needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import truestep as ts
from truestep.optimizers.probe import Probe, cache, probe
from truestep.optimizers.probe import ground as trying
from truestep.optimizers.probe.ground import find_ground
from truestep.optimizers.probe.measure import Measured, measure
from truestep.optimizers.probe.plan import subjects_of
from truestep.optimizers.probe.quiet import quiet
from truestep.words.scope import Scope


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure anew, whatever is remembered on this machine."""
    monkeypatch.setenv("TRUESTEP_CACHE", "off")
    cache.forget()


class Rule(torch.optim.Optimizer):
    """Descent by an update of one param; subclasses say which."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        return param.grad

    def common(self, params: list[Tensor]) -> float | Tensor:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        scale = self.common(every)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * scale * self.update(param, self.state[param])


class RowWise(Rule):
    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        return (
            param.grad / (1 + param.grad.flatten(1).norm(dim=1)).view(-1, *[1] * (param.ndim - 1))
            if param.ndim > 1
            else param.grad
        )


class ColumnWise(Rule):
    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        return param.grad / (1 + param.grad.norm(dim=0)) if param.ndim > 1 else param.grad


class Faint(Rule):
    """One element's update depends on the others by a millionth."""

    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        return param.grad + 1e-6 * param.grad.mean()


class ByShape(Rule):
    """Element-wise, but its rate follows the number of rows."""

    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        return param.grad * (len(param) if param.ndim > 1 else 1)


class DecayOfMatrices(Rule):
    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        return param.grad + 0.1 * param if param.ndim > 1 else param.grad


class GroupWise(Rule):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            norm = sum(param.grad.norm() for param in params)
            for param in params:
                param -= group["lr"] * param.grad / (1 + norm)


class ModelWise(Rule):
    def common(self, params: list[Tensor]) -> float | Tensor:
        return 1 / (1 + sum(param.grad.norm() for param in params))


class OnlyInTheBowl(Rule):
    """What params share moves only where gradients shrink for good, as no noise does."""

    def common(self, params: list[Tensor]) -> float | Tensor:
        last = getattr(self, "last", None)
        self.last = sum(param.grad.abs().sum() for param in params)
        self.shrunk = getattr(self, "shrunk", 0) + 1 if last is not None and self.last < last else 0
        return 1.0 + self.last if self.shrunk > 3 else 1.0


class Rounding(Rule):
    """Element-wise, through a power whose vector and scalar kernels round differently."""

    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        state["sum"] = state.get("sum", torch.zeros_like(param)) + param.grad**2
        return param.grad / (state["sum"].pow(1 / 3) + 1e-3)


class LooksUpLate(Rule):
    """From step `warmup` on it looks at the whole tensor."""

    def __init__(self, params: Any, lr: float = 0.02, warmup: int = 40) -> None:
        self.warmup = warmup
        super().__init__(params, lr)

    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        state["count"] = state.get("count", 0) + 1
        return param.grad / (1 + param.grad.norm()) if state["count"] > self.warmup else param.grad


class Draws(Rule):
    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        return param.grad + 0.1 * torch.randn_like(param)


class DrawsFromNumpy(Rule):
    def common(self, params: list[Tensor]) -> float | Tensor:
        return 1.0 + numpy.random.random()


class DrawsFromItsOwn(Rule):
    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        generator = state.setdefault("generator", torch.Generator().manual_seed(1))
        return param.grad * (1 + torch.rand((), generator=generator))


class Still(Rule):
    def update(self, param: Tensor, state: dict[str, Any]) -> Tensor:
        return torch.zeros_like(param)


PLANTED: dict[type[Rule], tuple[str, str]] = {  # the scope in 2 dims, and in 1
    Rule: ("element", "element"),
    RowWise: ("row", "element"),
    ColumnWise: ("column", "element"),
    Faint: ("tensor", "tensor"),
    DecayOfMatrices: ("element", "element"),
    GroupWise: ("group", "group"),
    ModelWise: ("model", "model"),
    OnlyInTheBowl: ("model", "model"),
    Rounding: ("element", "element"),
    LooksUpLate: ("tensor", "tensor"),
    Draws: ("element", "element"),
}


FLAT_AND_WIDE = {"first.bias": (13,), "first.weight": (7, 4), "second.weight": (4, 9), "second.bias": (5,)}


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_a_planted_scope_is_found(rule: type[Rule]) -> None:
    found = probe(rule, params=FLAT_AND_WIDE)
    assert (found.scope_by_ndim[2], found.scope_by_ndim[1]) == PLANTED[rule], found


@pytest.mark.parametrize(("kind", "shared"), [("noise", None), ("drift", None), ("bowl", Scope.MODEL)])
def test_what_one_kind_of_gradients_does_not_show_another_does(kind: str, shared: Scope | None) -> None:
    ground, _ = find_ground(OnlyInTheBowl, {}, subjects_of(None))
    assert ground is not None
    seen = Measured()
    with quiet():
        measure(ground, seen, kinds=(kind,))
    assert seen.shared is shared


def test_what_lies_beyond_the_steps_is_reported_and_reached_by_lowering_it() -> None:
    found = probe(LooksUpLate, warmup=1000)
    assert found.not_reached == ("warmup",)
    assert found.scope == "tensor"


def test_a_rate_that_follows_the_shape_does_not_survive_a_cut_by_rows_or_a_reshape() -> None:
    found = probe(ByShape)
    assert found.scope_by_ndim == {0: "element", 1: "element", 2: "column", 4: "column"}
    assert found.shape_sensitive


@pytest.mark.parametrize(("rule", "sensitive"), [(DecayOfMatrices, True), (Rule, False)])
def test_a_reshape_that_changes_updates_is_told_from_one_that_does_not(rule: type[Rule], sensitive: bool) -> None:
    assert probe(rule).shape_sensitive is sensitive


@pytest.mark.parametrize("rule", [Draws, DrawsFromNumpy, DrawsFromItsOwn])
def test_random_numbers_are_seen_whoever_draws_them(rule: type[Rule]) -> None:
    assert probe(rule, params="2d").draws


def test_a_class_whose_steps_take_long_is_measured_with_one_kind_of_gradients_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trying, "MOST_OPERATIONS", 0)
    found = probe(torch.optim.SGD, params="1d")
    assert found.scope == "element"
    assert "measured with one kind of gradients only" in found.notes[0]


def test_a_class_that_never_moves_is_not_checked_and_its_scope_is_the_widest() -> None:
    found = probe(Still)
    assert (found.checked, found.why, found.scope) == (False, "no param moved in 64 steps", "model")
    assert str(found).endswith("not checked: no param moved in 64 steps")


# -- Traits, keys and needs


@pytest.mark.parametrize(
    ("optimizer", "settings", "sensitive"),
    [(torch.optim.SGD, {}, False), (torch.optim.SGD, {"momentum": 0.9}, True), (torch.optim.Adagrad, {}, False)],
)
def test_an_absent_gradient_is_told_from_a_zero_one(optimizer: Any, settings: dict[str, Any], sensitive: bool) -> None:
    assert probe(optimizer, params="2d", **settings).none_sensitive is sensitive


def test_the_keys_of_adamw_are_known_with_what_they_follow() -> None:
    found = probe(torch.optim.AdamW, amsgrad=True)
    assert {key.key: (key.owner, key.kind, key.dtype, key.is_like_param) for key in found.keys} == {
        "step": ("param", "tensor", "float32", False),
        "exp_avg": ("param", "tensor", "float32", True),
        "exp_avg_sq": ("param", "tensor", "float32", True),
        "max_exp_avg_sq": ("param", "tensor", "float32", True),
    }
    assert found.lazy
    assert found.inert is False  # its counter rises: the first real update would be the second's
    assert found.group_state == ()


def test_factored_state_follows_the_dims_that_it_does() -> None:
    keys = {key.key: key for key in probe(torch.optim.Adafactor).keys}
    assert keys["row_var"].dims_by_ndim[2] == ("dim 0", "1")
    assert keys["col_var"].dims_by_ndim[2] == ("1", "dim 1")
    assert keys["variance"].dims_by_ndim == {0: (), 1: ("dim 0",)}


def test_state_that_the_constructor_makes_is_not_lazy_and_an_idle_step_of_adagrad_is_inert() -> None:
    found = probe(torch.optim.Adagrad)
    assert (found.lazy, found.inert) == (False, True)


def test_a_counter_in_the_group_and_a_need_for_flags_are_found() -> None:
    found = probe(pytest.importorskip("pytorch_optimizer").Muon)
    assert found.group_state == ("step",)
    assert found.needs == ("use_muon",)
    assert found.scope_by_ndim == {0: "element", 1: "element", 2: "tensor", 4: "tensor"}


def test_lbfgs_is_probed_with_a_closure_and_its_directions_are_of_all_params() -> None:
    found = probe(torch.optim.LBFGS)
    assert (found.scope, found.needs) == ("model", ("closure",))
    assert next(key for key in found.keys if key.key == "d").dims_by_ndim == {0: ("total",)}


def test_muon_takes_matrices_only_and_says_so() -> None:
    found = probe(torch.optim.Muon)
    assert (found.scope_by_ndim, found.needs) == ({2: "tensor"}, ("2d",))
    assert {"2d", "strided", "bfloat16"} <= set(found.accepts)
    assert {"1d", "sparse", "complex64"}.isdisjoint(found.accepts)
    assert found.shape_sensitive


def test_sparse_adam_says_that_it_needs_sparse_gradients() -> None:
    found = probe(torch.optim.SparseAdam)
    assert (found.checked, found.needs) == (False, ("sparse",))
    assert "does not support dense gradients" in found.why


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}])
def test_other_kernels_change_no_scope(settings: dict[str, bool]) -> None:
    assert probe(torch.optim.AdamW, **settings).scope == "element"


# -- What can be probed


def muon_and_adamw(named: Any) -> list[torch.optim.Optimizer]:
    matrices = [param for _, param in named if param.ndim == 2]
    return [torch.optim.Muon(matrices), torch.optim.AdamW([param for _, param in named if param.ndim != 2])]


def test_a_function_that_builds_muon_for_matrices_and_adamw_for_the_rest_answers() -> None:
    found = probe(muon_and_adamw)
    assert found.scope_by_ndim == {0: "element", 1: "element", 2: "tensor", 4: "element"}
    assert found.optimizer.endswith("muon_and_adamw")


def rate_by_layer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [param], "lr": 0.01 * (1 + len(name) % 3)} for name, param in named])


def test_params_of_unlike_settings_are_not_fused_as_no_engine_would() -> None:
    found = probe(rate_by_layer)
    assert (found.scope, found.shape_sensitive) == ("element", False)


def test_a_partial_of_a_class_is_the_class_with_settings() -> None:
    found = probe(functools.partial(torch.optim.SGD, momentum=0.9), params="1d")
    assert (found.optimizer, dict(found.settings)) == ("torch.optim.sgd.SGD", {"momentum": "0.9"})


@pytest.mark.parametrize(("params", "ndims"), [("2d", [2]), ({"w": (8, 6)}, [2]), ({"a": (5,), "b": (2, 3, 4)}, [1, 3])])
def test_params_choose_what_is_tried(params: Any, ndims: list[int]) -> None:
    assert list(probe(torch.optim.SGD, params=params).scope_by_ndim) == ndims


class NeedsMore(Rule):
    def __init__(self, params: Any, total: int) -> None:
        super().__init__(params)


class Wraps(Rule):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups)


def test_a_class_that_must_be_given_more_says_what() -> None:
    assert probe(NeedsMore).why.startswith("it must be given total: ts.probe(NeedsMore, total=...)")
    assert probe(NeedsMore, total=9).scope == "element"
    assert "lambda named: Wraps(" in probe(Wraps).why


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: probe(torch.optim.AdamW, lrr=1), "AdamW takes no setting lrr: expected some of lr, betas"),
        (lambda: probe("adamw"), "expected an optimizer class, or a function .*, found 'adamw'"),
        (lambda: probe(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])), "found an optimizer. Pass its class, SGD"),
        (lambda: probe(torch.optim.SGD, params="wide"), "expected params to be .*, found 'wide'"),
        (lambda: probe(torch.optim.SGD, params={"w": (0,)}), "expected params to be"),
    ],
)
def test_what_cannot_be_probed_is_refused_in_one_sentence(call: Callable[[], Probe], complaint: str) -> None:
    with pytest.raises(ts.UnsupportedError, match=complaint):
        call()


class Exits(Rule):
    def __init__(self, params: Any) -> None:
        raise SystemExit("no licence")


class WantsAGraph(Rule):
    def step(self, closure: Any) -> None:
        closure().backward()


@pytest.mark.parametrize(("rule", "why"), [(Exits, "SystemExit: no licence"), (WantsAGraph, "does not require grad")])
def test_what_stands_in_the_way_is_told_whatever_a_class_raises(rule: type[Rule], why: str) -> None:
    found = probe(rule)
    assert not found.checked
    assert why in found.why


def test_a_class_that_cannot_be_built_says_why_it_cannot() -> None:
    found = probe(torch.optim.SGD, lr=-1.0)
    assert (found.checked, found.why) == (False, "ValueError: Invalid learning rate: -1.0")


def test_the_text_says_that_it_is_evidence_and_what_was_found() -> None:
    text = str(probe(torch.optim.AdamW, lr=0.01))
    assert text.startswith("torch.optim.adamw.AdamW(lr=0.01): scope element (0-D element, 1-D element, 2-D element, 4-D element)")
    assert "exp_avg (float32, as the param)" in text
    assert text.endswith("evidence, not proof.")
