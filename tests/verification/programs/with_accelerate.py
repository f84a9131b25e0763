"""Loops over accelerate as people write them: some right, some with one fault."""

from __future__ import annotations

from tiny import adagrad, loss, program, recipe
from torch.distributed.tensor import distribute_tensor


def accumulate(model, optimizer, batches, accelerator):
    """Train as accelerate's documentation has it: it divides the loss, and steps at the window's end."""
    accelerator.gradient_accumulation_steps = len(batches)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


healthy = recipe(accumulate)


@program(max_norm=0.5)
def healthy_and_clipped(model, optimizer, batches, accelerator):
    accelerator.gradient_accumulation_steps = len(batches)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


@program()
def divides_by_the_micro_batches_twice(model, optimizer, batches, accelerator):
    accelerator.gradient_accumulation_steps = len(batches)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch) / len(batches))
            optimizer.step()
            optimizer.zero_grad()


@program()
def does_not_accumulate(model, optimizer, batches, accelerator):
    accelerator.gradient_accumulation_steps = 1
    for batch in batches:
        accelerator.backward(loss(model, batch) / len(batches))
        optimizer.step()
        optimizer.zero_grad()


@program()
def accumulates_by_hand(model, optimizer, batches, accelerator):
    """Divide by hand and step once: right, unless an engine steps inside `backward`."""
    accelerator.gradient_accumulation_steps = 1
    for batch in batches:
        accelerator.backward(loss(model, batch) / len(batches))
    optimizer.step()
    optimizer.zero_grad()


@program(max_norm=0.5, deepspeed_config={"gradient_clipping": 0.0})
def clips_by_a_value_that_the_engine_ignores(model, optimizer, batches, accelerator):
    accelerator.gradient_accumulation_steps = len(batches)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


# --- Adagrad, whose state `prepare` leaves with the params of before


def move_state(optimizer):
    """Move each entry of the state to the param that took its place, sharded as it is."""
    held = optimizer.optimizer
    params = [param for group in held.param_groups for param in group["params"]]
    if set(params) == set(held.state):
        return
    before = list(held.state.values())
    held.state.clear()
    for param, state in zip(params, before, strict=True):
        held.state[param] = {**state, "sum": distribute_tensor(state["sum"], param.device_mesh, param.placements)}


adagrad_keeps_its_old_state = recipe(accumulate, optimizer=adagrad)


@program(optimizer=adagrad)
def healthy_adagrad(model, optimizer, batches, accelerator):
    move_state(optimizer)
    accumulate(model, optimizer, batches, accelerator)
