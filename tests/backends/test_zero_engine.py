"""How an engine of ours is made, what it refuses, and what a user's own is warned of."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from truestep.backends import base
from truestep.backends.base import Settings
from truestep.backends.zero_engine import configuration
from truestep.words.errors import UnsupportedError

pytest.importorskip("deepspeed")


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, bias=False))


def adamw(params):
    return torch.optim.AdamW([param for _, param in params], lr=0.01)


def test_the_config_says_what_deepspeed_would_decide_in_silence():
    config = configuration(3, torch.bfloat16, 21, Settings(micro_batches=4))
    assert config["gradient_clipping"] == 0.0
    assert config["zero_optimization"]["memory_efficient_linear"] is False
    assert config["gradient_accumulation_steps"] == 4
    assert config["bf16"] == {"enabled": True}
    assert configuration(1, torch.float32, 21, Settings(max_norm=0.5))["gradient_clipping"] == 0.5


def test_extra_settings_are_merged_at_every_depth():
    extra = {"zero_optimization": {"sub_group_size": 7}, "prescale_gradients": True}
    config = configuration(3, torch.float32, 21, Settings(extra=extra))
    assert config["zero_optimization"]["sub_group_size"] == 7
    assert config["zero_optimization"]["stage"] == 3
    assert config["prescale_gradients"] is True


@pytest.mark.truestep(world_size=2)
def test_an_engine_whose_config_is_silent_on_clipping_is_warned_of(rank, world_size):
    import deepspeed

    def users_own(model, backend):
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    session = base.wrap("zero2", net(), adamw, Settings(wrap=users_own))
    again = base.attach(session.model)
    try:
        for each in (session, again):
            assert [finding.code for finding in each.warnings()] == ["gradient/engine-clips-by-default"]
        assert again.backend == "zero2"
        assert again.view().digests() == session.view().digests()
        with pytest.raises(UnsupportedError, match="Pass the engine"):
            base.attach(session.model.module, session.model.optimizer)
        with pytest.raises(UnsupportedError, match="2 models"):
            base.attach([session.model, session.model])
    finally:
        session.close()
    ours = base.wrap("zero2", net(), adamw, Settings())
    assert ours.warnings() == []
    ours.close()


@pytest.mark.truestep(world_size=2)
def test_what_an_engine_cannot_hold_is_refused_in_one_message(rank, world_size):
    mixed = net()
    mixed[1].bfloat16()

    def several(params):
        return [adamw([pair]) for pair in params[:2]]

    with pytest.raises(UnsupportedError, match="2 models"):
        base.wrap("zero1", [net(), net()], adamw, Settings())
    with pytest.raises(UnsupportedError, match="2 optimizers"):
        base.wrap("zero1", net(), several, Settings())
    scalar = net()
    scalar[1].gain = nn.Parameter(torch.tensor(2.0))
    with pytest.raises(UnsupportedError, match="0-d params, found 1.gain"):
        base.wrap("zero2", scalar, adamw, Settings())
    with pytest.raises(UnsupportedError, match="found torch.bfloat16 and torch.float32"):
        base.wrap("zero3", mixed, adamw, Settings())


def test_a_process_group_that_was_made_anew_is_joined_again(tmp_path):
    script = textwrap.dedent("""
        import torch, sys
        from truestep.backends import base
        for attempt in range(2):
            torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{attempt}", rank=0, world_size=1)
            for backend in ("zero1", "zero3"):
                session = base.wrap(backend, torch.nn.Linear(3, 2), lambda params: torch.optim.SGD([p for _, p in params], 0.1),
                                    base.Settings())
                with session.micro_batch(last=True):
                    session.backward(session.model(torch.ones(1, 3)).sum())
                session.step()
                assert session.view()["weight", "param"].full().shape == (2, 3)
                session.close()
            torch.distributed.destroy_process_group()
        print("joined twice")
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(key, None)
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "joined twice"
