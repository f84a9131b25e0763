"""FSDP2: names and params from its own records, whatever the modules show; the same gradients and content as a plain model."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import truestep as ts
from truestep.backends import base, dtensor
from truestep.backends.base import Settings
from truestep.state import ranks
from truestep.words.errors import UnsupportedError
from truestep.words.layout import Layout

U = 2.0**-24


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden):
        return hidden + self.down(self.up(hidden).tanh())


class Net(nn.Module):
    """Sizes that do not divide, a head that is tied to the embedding and used without its module's forward, a frozen param."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([Block(5, 3), Block(5, 1)])
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.tensor([1.25]))
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.linear(self.norm(hidden) * self.gain, self.embedding.weight)


NAMES = [name for name, _ in Net().named_parameters()]
TRAINED = [name for name, param in Net().named_parameters() if param.requires_grad]


def loss_of(model, step, micro, rank):
    tokens = torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
    return nn.functional.cross_entropy(model(tokens).float(), (3 * tokens + step) % 7) * 3.0**step


def adamw(params):
    return torch.optim.AdamW([param for _, param in params], lr=0.02)


def sharded(**options):
    """Return a wrap that shards the blocks and the root with these options of `fully_shard`."""

    def wrap(model, backend="fsdp2"):
        for layer in model.layers:
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    return wrap


def whole_of(slot):
    return slot.full("all")


def look(session):
    """Return all that a look may not change, with what the view says: names, and every value of every slot."""
    modules = session.modules()
    shown = [id(param) for module in modules for part in module.modules() for param in part._parameters.values()]
    gradients = [None if param.grad is None else param.grad.to_local().clone() for _, param in session.params()]
    entries = [(len(optimizer.state), sum(map(len, optimizer.state.values()))) for optimizer in session.optimizers]
    return shown, gradients, entries, torch.get_rng_state(), ranks.collectives_started()


def is_unchanged(before, after):
    gradients = zip(before[1], after[1], strict=True)
    return (
        (before[0], before[2], before[4]) == (after[0], after[2], after[4])
        and torch.equal(before[3], after[3])
        and all(old is new or torch.equal(old, new) for old, new in gradients)
    )


OPTIONS = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "freed": {"reshard_after_forward": True},
    "smaller mesh": {"reshard_after_forward": 2},
}


def watch(options, rank):
    """Take views at every moment of a step: each shows the sharded params, and changes nothing."""
    wrap = sharded(**OPTIONS[options])
    session = base.wrap("fsdp2", Net(), adamw, Settings(wrap=wrap))
    content = ts.inspect(Net()).digests()
    moments = []

    def check(moment):
        before = look(session)
        view = session.view()
        assert is_unchanged(before, look(session))
        held = {id(param) for group in session.optimizers[0].param_groups for param in group["params"]}
        assert [name for name, param in session.params() if id(param) in held] == TRAINED
        assert session.unsharded() == ()
        assert view.names == NAMES
        digests = view.digests()
        assert (content == {key: digests[key] for key in content}) == (moment != "after step")
        moments.append([isinstance(param, DTensor) for param in session.modules()[0].parameters()])

    check("made")
    with torch.no_grad():
        loss_of(session.model, 1, 0, rank)
    check("after a forward without gradients")
    loss = loss_of(session.model, 1, 0, rank)
    check("between forward and backward")
    loss.backward()
    check("after backward")
    session.step()
    check("after step")
    assert all(moments[0]), "at first the module shows the sharded ones"
    assert all(moments[1]) == (options in ("freed", "smaller mesh")), "the test would see nothing"


# -- Names, params and shards


@pytest.mark.truestep(world_size=2)
@pytest.mark.parametrize("options", ["default", "kept", "freed"])
def test_a_view_shows_the_sharded_params_whenever_it_is_taken_and_changes_nothing(options, rank, world_size):
    watch(options, rank)


@pytest.mark.truestep(world_size=2)
def test_another_dim_may_be_sharded(rank, world_size):
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5))
    plain = model[0].weight.detach().clone()
    fully_shard(model, shard_placement_fn=lambda param: Shard(1) if param.shape == (3, 6) else None)
    view = ts.inspect(model)
    slot = view["0.weight", "param"]
    assert slot.shard.layout is Layout.BLOCK
    assert (slot.boxes[0].start, slot.boxes[0].stop) == ((0, 3 * rank), (3, 3 * rank + 3))
    assert torch.equal(slot.local[0], plain[:, 3 * rank : 3 * rank + 3])
    assert torch.equal(whole_of(slot), plain)
    assert (
        view.digests()["0.weight/param"] == ts.inspect([nn.ParameterDict({"weight": plain}), model]).digests()["0.weight/param"]
    )


@pytest.mark.truestep(world_size=2)
def test_tensors_that_are_whole_or_not_reduced_yet_are_replicas(rank, world_size):
    mesh = ranks.mesh("cpu")
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["whole"] = DTensor.from_local(torch.full((4,), 2.5), mesh, [Replicate()])
    optimizer.state[model.weight]["partial"] = DTensor.from_local(torch.full((4,), 2.0 + rank), mesh, [Partial()])
    optimizer.param_groups[0]["d"] = DTensor.from_local(torch.tensor(3.0 + rank), mesh, [Partial()])
    session = dtensor.attach(model, optimizer)
    view = session.view()
    assert view["weight", "whole"].local[0].tolist() == [2.5] * 4
    assert view["weight", "partial"].local[0].tolist() == [5.0] * 4
    assert view["@group/0", "d"].local[0].item() == 7.0
    assert all(slot.shard.layout is Layout.WHOLE for slot in view.values())


@pytest.mark.truestep(world_size=2)
def test_compiling_wrapping_checkpoints_and_the_order_of_both_change_no_name(rank, world_size):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Net()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    whole = torch.compile(sharded()(model), backend="eager")
    session = base.attach(whole, adamw(list(model.named_parameters())))
    assert (session.backend, session.view().names) == ("fsdp2", NAMES)
    assert session.modules() == [model]
    assert session.contract().operators_replaced == "torch.compile replaces operators"


@pytest.mark.truestep(world_size=2)
def test_several_models_are_labelled_and_each_is_found_in_its_own_records(rank, world_size):
    models = {"a": sharded()(Net()), "b": nn.Linear(2, 3)}
    view = ts.inspect(models, {"a": torch.optim.Adagrad(models["a"].parameters(), lr=0.1)})
    assert view.names == [*(f"a.{name}" for name in NAMES), "b.weight", "b.bias"]
    assert view["b.weight", "param"].shard.layout is Layout.WHOLE
    assert view["a.gain", "sum"].shape == (1,)
    session = base.wrap("fsdp2", [Net(), Net()], lambda params: [adamw(params[:9]), adamw(params[9:])], Settings())
    told = []
    session.on_step(lambda index: told.append(index), lambda index, entering: told.append(len(entering)))
    sum(loss_of(model, 1, 0, rank) for model in session.model).backward()
    session.clip(0.5)
    session.step()
    assert told == [0, 9, 1, len(TRAINED) * 2 - 9]
    assert session.view()["1.gain", "exp_avg"].shape == (1,)


@pytest.mark.truestep(world_size=2)
def test_who_holds_what_is_told_by_identity(rank, world_size):
    model = Net()
    before = adamw([pair for pair in model.named_parameters() if pair[1].requires_grad])
    session = base.attach(sharded()(model), before)
    held = {param_id for _, ids in session.identity().held for param_id in ids}
    assert held.isdisjoint(session.identity().live)
    assert list(session.identity().live.values()) == TRAINED
    assert list(session.identity().frozen.values()) == ["norm.bias"]
    first = base.wrap("fsdp2", Net(), adamw, Settings(optimizer_first=True))
    assert {i for _, ids in first.identity().held for i in ids}.isdisjoint(first.identity().live)
    with torch.no_grad():
        loss_of(model, 1, 0, rank)
    gathered = base.attach(model, adamw(list(model.named_parameters())))
    assert set(gathered.identity().unsharded) == {"gain", "embedding.weight", "norm.weight", "norm.bias"}
    assert base.wrap("fsdp2", Net(), adamw, Settings()).identity().unsharded == ()


# -- Wrapping


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(2, 2)
        self.nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)]), nn.Sequential(nn.Linear(2, 5))])
        self.twice = nn.ModuleList([self.nested[1], nn.Dropout()])
        tied = nn.Linear(2, 2)
        tied.weight = self.shared.weight
        self.tied = nn.ModuleList([tied, nn.Sequential(nn.ModuleList([nn.Linear(2, 6)]))])


def test_blocks_are_elements_of_lists_that_own_their_params_each_once():
    model = Shapes()
    assert dtensor.blocks(model) == [*model.nested[0], model.nested[1], model.tied[1]]
    assert dtensor.blocks(nn.Linear(2, 3)) == []


def test_what_fsdp2_cannot_shard_is_refused_before_anything_is_wrapped():
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(2.0)), "matrix": nn.Parameter(torch.ones(2, 3))})
    with pytest.raises(UnsupportedError, match="0-d params, found scale. Give them one element"):
        base.wrap("fsdp2", model, adamw, Settings())
    with pytest.raises(UnsupportedError, match="'fsdp2' needs a process group, found none"):
        base.wrap("fsdp2", nn.Linear(2, 3), adamw, Settings())


# -- On more ranks, last: each size of world has processes of its own


@pytest.mark.truestep(world_size=3)
def test_uneven_and_empty_shards_have_the_boxes_that_cover_the_param_once(rank, world_size):
    session = base.wrap("fsdp2", Net(), adamw, Settings())
    loss_of(session.model, 1, 0, rank).backward()
    session.step()
    view = session.view()
    plain = Net()
    expected = {7: (3, 3, 1), 5: (2, 2, 1), 3: (1, 1, 1), 1: (1, 0, 0)}
    for name, param in plain.named_parameters():
        rows = expected[param.shape[0]]
        for key in [key for key in view.keys_of(name) if key != "step"]:
            slot = view[name, key]
            assert slot.shape == tuple(param.shape)
            assert slot.shard.layout is Layout.DIM0
            assert [tuple(tensor.shape) for tensor in slot.local] == [box.shape for box in slot.boxes]
            assert [(box.start[0], box.stop[0]) for box in slot.boxes] == (
                [(sum(rows[:rank]), sum(rows[: rank + 1]))] if rows[rank] else []
            )
            assert whole_of(slot).shape == param.shape
    assert set(view.digests()) == {f"{name}/{key}" for name, key in view}


@pytest.mark.truestep(world_size=4)
def test_two_dims_of_a_mesh_make_replicas_or_blocks(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    content = torch.arange(30.0).reshape(6, 5)
    hybrid = nn.Linear(5, 6)
    with torch.no_grad():
        hybrid.weight.copy_(content)
    fully_shard(hybrid, mesh=mesh)
    slot = ts.inspect(hybrid)["weight", "param"]
    assert (slot.boxes[0].start, slot.boxes[0].stop) == ((3 * (rank % 2), 0), (3 * (rank % 2) + 3, 5))
    assert torch.equal(whole_of(slot), content)
    block = nn.ParameterDict({"weight": nn.Parameter(distribute_tensor(content, mesh, [Shard(0), Shard(1)]))})
    slot = ts.inspect(block)["weight", "param"]
    assert slot.shard.layout is Layout.BLOCK
    assert torch.equal(whole_of(slot), content)
    digests = [ts.inspect(model).digests()["weight/param"] for model in (hybrid, block)]
    assert digests[0] == digests[1] == ts.inspect(nn.ParameterDict({"weight": content})).digests()["weight/param"]


@pytest.mark.truestep(world_size=4)
def test_a_view_shows_the_sharded_params_of_those_that_go_to_a_smaller_mesh_after_forward(rank, world_size):
    watch("smaller mesh", rank)
