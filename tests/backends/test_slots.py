"""Reading optimizers of one process: every slot by its name, nothing created, nothing moved."""

from collections import OrderedDict, deque

import pytest
import torch
from torch import nn

import truestep as ts
from truestep.backends import slots


class Keeper(torch.optim.SGD):
    """Keeps state in all the places that optimizers use."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.total = torch.tensor(1.5)
        self.rounds = 3
        self.window = deque([torch.full((2,), 4.0), torch.full((3,), 5.0)])
        self.table = {"low": -1.0, "high": torch.tensor([7.0, 8.0])}
        self.members = [param for group in self.param_groups for param in group["params"]]
        self.inner = torch.optim.SGD(self.members, lr=1.0)
        self.label = "a setting"
        self._private = torch.tensor(9.0)
        self.state["shared"] = torch.tensor([10.0])


def layer(rows=3, columns=2):
    made = nn.Linear(columns, rows)
    with torch.no_grad():
        for index, param in enumerate(made.parameters()):
            param.copy_(torch.arange(param.numel()).reshape(param.shape) + 100.0 * index)
    return made


def stepped(optimizer, *modules):
    for module in modules:
        for index, param in enumerate(module.parameters()):
            param.grad = torch.full_like(param, 0.5 + index)
    optimizer.step()
    return optimizer


def names_of(view):
    return [f"{name}/{key}" for name, key in view]


def test_one_thing_has_no_label_and_several_have_their_index_or_key():
    first, second = layer(), layer(4)
    assert slots.labelled_items(first) == [(None, first)]
    assert slots.labelled_items([first]) == [(None, first)]
    assert slots.labelled_items((first, second)) == [("0", first), ("1", second)]
    assert slots.labelled_items({"a": first, 2: second}) == [("a", first), ("2", second)]
    both = nn.ModuleDict({"a": first, "b": second})
    assert slots.labelled_items(both) == [(None, both)]


@pytest.mark.parametrize("things", ["x", ["x"], ["x", "y"], ("x", "y"), {"a": "x", "b": "y"}])
def test_like_gives_items_the_form_that_things_have(things):
    upper = [item.upper() for _, item in slots.labelled_items(things)]
    made = slots.like(things, upper)
    assert [item for _, item in slots.labelled_items(made)] == upper
    assert isinstance(made, dict) == isinstance(things, dict)
    assert isinstance(made, str) == isinstance(things, str)


def test_of_tied_params_the_first_name_counts_also_across_models():
    first, second = layer(), layer(4)
    second.bias = nn.Parameter(torch.zeros(4))
    second.extra = first.weight
    assert [name for name, _ in slots.named_params({"a": first, "b": second})] == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_every_entry_of_every_group_is_a_slot_but_those_that_say_what_it_is_over():
    module = layer()
    rate = torch.tensor(0.25)
    groups = [{"params": [module.weight], "name": "matrices", "lr": rate}, {"params": [module.bias], "name": "vectors"}]
    view = ts.inspect(module, torch.optim.AdamW(groups, lr=0.125, betas=(0.5, 0.75)))
    assert {name for name, _ in view if name.startswith("@")} == {"@group/matrices", "@group/vectors"}
    assert view["@group/matrices", "lr"].kind == "tensor"
    assert view["@group/matrices", "lr"].local[0].data_ptr() == rate.data_ptr()
    assert (view["@group/vectors", "lr"].value, view["@group/vectors", "betas"].value) == (0.125, (0.5, 0.75))
    assert {"params", "name", "param_names"}.isdisjoint(view.keys_of("@group/vectors"))


def test_groups_without_names_or_with_equal_ones_are_called_by_their_index():
    module = layer()
    plain = ts.inspect(module, torch.optim.SGD([{"params": [module.weight]}, {"params": [module.bias]}], lr=0.1))
    same = [{"params": [module.weight], "name": "all"}, {"params": [module.bias], "name": "all"}]
    for view in (plain, ts.inspect(module, torch.optim.SGD(same, lr=0.1))):
        assert {name for name, _ in view if name.startswith("@")} == {"@group/0", "@group/1"}


def test_named_params_in_the_optimizer_make_no_slot():
    module = layer()
    view = ts.inspect(module, torch.optim.SGD(module.named_parameters(), lr=0.1))
    assert "param_names" not in view.keys_of("@group/0")


def test_what_the_optimizer_object_keeps_is_at_optimizer():
    module = layer()
    view = ts.inspect(module, Keeper(module.parameters(), lr=0.1))
    assert view.keys_of("@optimizer") == ["total", "rounds", "window/0", "window/1", "table/low", "table/high", "shared"]
    assert view["@optimizer", "rounds"].value == 3
    assert view["@optimizer", "window/1"].shape == (3,)
    assert view["@optimizer", "shared"].local[0].tolist() == [10.0]


def test_state_and_attribute_of_one_key_are_both_shown():
    module = layer()
    optimizer = Keeper(module.parameters(), lr=0.1)
    optimizer.state["rounds"] = 5
    view = ts.inspect(module, optimizer)
    assert (view["@optimizer", "rounds"].value, view["@optimizer", "state/rounds"].value) == (3, 5)


def test_a_schedule_and_a_scaler_add_no_slot():
    module = layer()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    before = list(ts.inspect(module, optimizer))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    assert set(ts.inspect(module, optimizer)) - set(before) == {("@group/0", "initial_lr")}


def test_containers_in_a_params_state_are_flattened_to_key_paths():
    module = layer()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    basis = OrderedDict(left=torch.eye(3), right=[torch.eye(2), None])
    optimizer.state[module.weight] = {
        "Q": basis,
        "history": deque([1.0, 2.0]),
        "step": 4,
        7: torch.zeros(5),
        "projector": object(),
    }
    view = ts.inspect(module, optimizer)
    assert view.keys_of("weight") == ["param", "Q/left", "Q/right/0", "Q/right/1", "history", "step", "7", "projector"]
    kinds = [view["weight", key].kind for key in view.keys_of("weight")]
    assert kinds == ["tensor", "tensor", "tensor", "value", "value", "value", "tensor", "opaque"]
    assert view["weight", "Q/right/0"].local[0].data_ptr() == basis["right"][0].data_ptr()


def test_a_param_that_two_optimizers_hold_shows_the_state_of_both():
    module = layer()
    one = stepped(torch.optim.AdamW(module.parameters(), lr=0.1), module)
    two = stepped(torch.optim.Adagrad([module.bias], lr=0.1), module)
    view = ts.inspect(module, {"main": one, "late": two})
    assert view.keys_of("bias") == ["param", "step", "exp_avg", "exp_avg_sq", "late/step", "sum"]
    assert view["bias", "late/step"].local[0].data_ptr() == two.state[module.bias]["step"].data_ptr()


def test_several_optimizers_keep_their_groups_and_own_state_apart():
    module = layer()
    view = ts.inspect(module, {"a": Keeper([module.weight], lr=0.1), "b": torch.optim.SGD([module.bias], lr=0.2)})
    assert {name for name, _ in view if name.startswith("@")} == {"@group/a.0", "@group/b.0", "@optimizer/a"}
    assert view["@group/b.0", "lr"].value == 0.2


def test_a_view_creates_nothing_and_is_live():
    module = layer()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    before, generator = {name: param.clone() for name, param in module.named_parameters()}, torch.get_rng_state()
    assert names_of(ts.inspect(module, optimizer))[:2] == ["weight/param", "bias/param"]
    assert len(optimizer.state) == 0
    assert all(param.grad is None for param in module.parameters())
    assert all(torch.equal(param, before[name]) for name, param in module.named_parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    stepped(optimizer, module)
    view = ts.inspect(module, optimizer)
    for name, param in module.named_parameters():
        assert view[name, "param"].local[0].data_ptr() == param.data_ptr()
        for key, value in optimizer.state[param].items():
            assert view[name, key].local[0].data_ptr() == value.data_ptr()


def test_state_of_tensors_that_are_no_live_params_is_told_as_orphans():
    module, other = layer(), layer(5)
    optimizer = stepped(torch.optim.Adagrad(other.parameters(), lr=0.1), other)
    view = ts.inspect(module, optimizer)
    assert view.orphans == (("(5, 2) torch.float32", ("step", "sum")), ("(5,) torch.float32", ("step", "sum")))
    assert view.keys_of("weight") == ["param"]
    assert ts.inspect(other, optimizer).orphans == ()
