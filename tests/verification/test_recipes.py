"""Every built-in recipe keeps what it promises."""

import itertools
import pickle

import pytest
import torch

from truestep.verification.recipe import load
from truestep.verification.recipes import BUILT_IN, bytes_gpt, embedding_net
from truestep.words.errors import VerifyError

SMALL = {
    "bytes-gpt": "bytes-gpt:width=24,layers=2,heads=3,context=16,batch=2",
    "bf16-gpt": "bf16-gpt:width=24,layers=2,heads=3,context=16,batch=2",
    "embedding-net": "embedding-net",
    "accumulation-by-hand": "accumulation-by-hand",
    "three-linears": "three-linears:bias=1",
}
every = pytest.mark.parametrize("spec", [SMALL[name] for name in BUILT_IN])


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensors(batch):
    return [batch] if isinstance(batch, torch.Tensor) else list(batch)


def drawn(recipe, rank, size, count):
    return list(itertools.islice(iter(recipe.batches(rank, size)), count))


def trained(recipe, steps):
    model = recipe.model()
    optimizer = recipe.optimizer([(name, param) for name, param in model.named_parameters() if param.requires_grad])
    norms = []
    for batch in drawn(recipe, 0, 2, steps):
        optimizer.zero_grad()
        recipe.loss(model, batch).backward()
        norms.append(torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]).norm().item())
        optimizer.step()
    return model, norms


@every
def test_two_runs_are_bitwise_one(spec):
    one, other = trained(load(spec), 3)[0], trained(load(spec), 3)[0]
    for (name, mine), (_, theirs) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@every
def test_the_gradient_changes_its_scale(spec):
    norms = trained(load(spec), 4)[1]
    assert max(norms) > 1.1 * min(norms)
    assert len(set(norms)) == 4


@every
def test_every_rank_and_micro_batch_has_data_of_its_own_and_always_the_same(spec):
    recipe = load(spec)
    batches = [batch for rank in range(3) for batch in drawn(recipe, rank, 3, 4)]
    seen = {b"".join(part.numpy().tobytes() for part in tensors(batch)) for batch in batches}
    assert len(seen) == 12
    again = [batch for rank in range(3) for batch in drawn(recipe, rank, 3, 4)]
    for one, other in zip(batches, again, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors(one), tensors(other), strict=True))


@every
def test_making_it_draws_nothing_from_the_callers_generator(spec):
    recipe, before = load(spec), torch.get_rng_state()
    recipe.model()
    drawn(recipe, 1, 2, 2)
    assert torch.equal(torch.get_rng_state(), before)


@every
def test_the_loss_is_the_mean_over_its_items(spec):
    recipe = load(spec)
    model = recipe.model()
    first, second = drawn(recipe, 0, 1, 2)
    together = tuple(torch.cat(parts) for parts in zip(tensors(first), tensors(second), strict=True))
    both = recipe.loss(model, together if len(together) > 1 else together[0])
    items = [recipe.num_items(batch) for batch in (first, second)]
    losses = [recipe.loss(model, batch).double().item() for batch in (first, second)]
    mean = sum(n * loss for n, loss in zip(items, losses, strict=True)) / sum(items)
    # Two float32 means of under 1,024 terms each, in another order: n u of each, relative to terms of one sign.
    unit = 2.0**-8 if "bf16" in spec else 2.0**-24
    assert abs(both.item() - mean) <= 2 * 1024 * unit * abs(mean)


@every
def test_another_process_loads_the_same(spec):
    recipe = load(spec)
    again = pickle.loads(pickle.dumps(recipe))
    assert (again.spec, again.name, again.module) == (recipe.spec, recipe.name, recipe.module)
    state, other = recipe.model().state_dict(), again.model().state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        name: tuple(value.shape) for name, value in other.items()
    }


def test_a_name_alone_gives_the_documented_sizes():
    recipe = load("bytes-gpt")
    model, batch = recipe.model(), drawn(recipe, 0, 2, 1)[0]
    assert 0.8e6 < sum(param.numel() for param in model.parameters()) < 0.9e6
    assert (tuple(batch.shape), recipe.num_items(batch)) == ((4, 65), 4 * 64)
    assert model.head.weight is model.embedding.weight


def test_the_text_is_the_source_of_the_standard_library():
    content = bytes(bytes_gpt.text().tolist())
    assert b"class ArgumentParser" in content
    assert len(content) > 500_000


def test_no_text_is_one_clear_message(monkeypatch, tmp_path):
    monkeypatch.setattr(bytes_gpt.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(VerifyError, match="standard library"):
        bytes_gpt.text.__wrapped__()


def test_attention_does_not_look_ahead():
    model = load(SMALL["bytes-gpt"]).model()
    tokens = torch.arange(16).view(1, 16)
    changed = tokens.clone()
    changed[0, 9] = 200
    same = (model(tokens) == model(changed)).all(-1)[0]
    assert same[:9].all()
    assert not same[9:].any()


def test_every_param_of_bf16_gpt_is_bf16_and_its_loss_float32():
    recipe = load(SMALL["bf16-gpt"])
    model = recipe.model()
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert recipe.loss(model, drawn(recipe, 0, 1, 1)[0]).dtype == torch.float32
    assert model.head.weight is model.embedding.weight


def test_sizes_pass_through_the_spec():
    recipe = bytes_gpt.sized(width=24, heads=3)
    assert recipe.spec == "bytes-gpt:width=24,heads=3"
    assert load(recipe.spec).model().embedding.embedding_dim == 24


@pytest.mark.parametrize("settings", ["depth=3", "width", "width=big", "width=30,heads=4", "layers=0"])
def test_a_wrong_size_is_one_clear_message(settings):
    with pytest.raises(VerifyError, match="expected"):
        load(f"bytes-gpt:{settings}")


def test_embedding_net_has_what_it_says():
    recipe = load("embedding-net")
    model = recipe.model()
    shapes = [tuple(param.shape) for param in model.parameters()]
    assert len(set(shapes)) == len(shapes)
    assert {(1,), (1, 3)} <= set(shapes)
    assert all(size % 2 and size % 3 or size in (1, 3) for shape in shapes for size in shape)
    assert model.mix.weight is model.mix_again.weight
    for batch in drawn(recipe, 0, 1, 20):
        recipe.loss(model, batch).backward()
    assert model.unused.grad is None
    assert model.frozen.weight.grad is None
    touched = model.embedding.weight.grad.abs().sum(1) > 0
    assert touched[: embedding_net.TOUCHED].all()
    assert not touched[embedding_net.TOUCHED :].any()
    assert all(p.grad is not None for name, p in model.named_parameters() if name not in ("unused", "frozen.weight"))


def test_accumulation_by_hand_is_right_where_backward_does_not_step():
    """A labelled stand-in for accelerate, whose backward only adds up: the loop itself is no fault."""

    class AddsUp:
        def backward(self, loss):
            loss.backward()

    recipe = load("accumulation-by-hand")
    assert recipe.asks_for == ("accelerator",)
    assert recipe.deepspeed_config == {"gradient_accumulation_steps": 1}
    by_hand, plain = recipe.model(), recipe.model()
    make = recipe.optimizer
    optimizers = [make(list(model.named_parameters())) for model in (by_hand, plain)]
    data = drawn(recipe, 0, 1, 12)
    for step in range(3):
        window = data[4 * step : 4 * step + 4]
        recipe.train_step(by_hand, optimizers[0], window, accelerator=AddsUp())
        for batch in window:
            (recipe.loss(plain, batch) / 4).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for (name, mine), (_, theirs) in zip(by_hand.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
