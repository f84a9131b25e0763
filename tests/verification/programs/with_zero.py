"""Loops over a DeepSpeed engine as people write them: some right, some with one fault."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tiny import adagrad, loss, num_tokens, padded_batches, program, recipe, sgd


@program()
def healthy(model, optimizer, batches):
    """Let the engine count micro-batches and divide the loss, as its documentation has it."""
    total = 0.0
    for batch in batches:
        part = loss(model, batch)
        model.backward(part)
        model.step()
        total += part.item() / len(batches)
    return total


@program(max_norm=0.5, optimizer=sgd)
def healthy_and_clipped(model, optimizer, batches):
    for batch in batches:
        model.backward(loss(model, batch))
        model.step()


@program(batches=padded_batches, num_items=num_tokens)
def healthy_weights(model, optimizer, batches):
    tokens = torch.tensor(float(sum(map(num_tokens, batches))))
    dist.all_reduce(tokens)
    for batch in batches:
        weight = num_tokens(batch) * dist.get_world_size() / tokens
        model.backward(loss(model, batch) * weight * len(batches))  # the engine divides by the micro-batches
        model.step()


@program()
def divides_by_the_micro_batches_twice(model, optimizer, batches):
    for batch in batches:
        model.backward(loss(model, batch) / len(batches))
        model.step()


@program(batches=padded_batches, num_items=num_tokens)
def means_the_means(model, optimizer, batches):
    for batch in batches:
        model.backward(loss(model, batch))
        model.step()


def accumulate_by_hand(model, optimizer, batches):
    """Run all backward passes, then step: right only if the engine knows how many there are."""
    for batch in batches:
        model.backward(loss(model, batch) / len(batches))
    model.step()


def micro_batch_by_micro_batch(model, optimizer, batches):
    for batch in batches:
        model.backward(loss(model, batch) / len(batches))
        model.step()


at_one = {"gradient_accumulation_steps": 1}
accumulates_by_hand = recipe(accumulate_by_hand, deepspeed_config=at_one)
steps_in_every_micro_batch = recipe(micro_batch_by_micro_batch, deepspeed_config=at_one)


@program()
def steps_before_the_last_micro_batch(model, optimizer, batches):
    for index, batch in enumerate(batches):
        model.set_gradient_accumulation_boundary(index == len(batches) - 2)
        model.backward(loss(model, batch))
        model.step()


@program(max_norm=0.5, deepspeed_config={"gradient_clipping": 0.0})
def clips_with_torch(model, optimizer, batches):
    """Clip gradients that ZeRO 1 to 3 do not keep there."""
    for batch in batches:
        model.backward(loss(model, batch))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        model.step()


@program(max_norm=0.5, deepspeed_config={"gradient_clipping": 1.5})
def clips_at_another_norm(model, optimizer, batches):
    for batch in batches:
        model.backward(loss(model, batch))
        model.step()


def inner(optimizer):
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


@program()
def zeroes_its_state_before_each_window(model, optimizer, batches):
    for state in inner(optimizer).state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            if key in state:
                state[key].zero_()
    for batch in batches:
        model.backward(loss(model, batch))
        model.step()


@program()
def parks_moments_in_bf16_each_step(model, optimizer, batches):
    for batch in batches:
        model.backward(loss(model, batch))
        model.step()
    for state in inner(optimizer).state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].copy_(state[key].bfloat16())


# --- a schedule on the optimizer that was handed to the engine, which rebuilds Adagrad


def scheduled_adagrad(named_params):
    global handed_over
    handed_over = adagrad(named_params)
    return handed_over


def halved_each_step(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def on_the_optimizer_that_was_handed_over(optimizer):
    return halved_each_step(handed_over)


def on_the_optimizer_that_the_engine_has(optimizer):
    return halved_each_step(inner(optimizer))


def train_on_schedule(model, optimizer, batches, scheduler):
    for batch in batches:
        model.backward(loss(model, batch))
        model.step()
    scheduler.step()


schedules_the_optimizer_that_was_handed_over = recipe(
    train_on_schedule, optimizer=scheduled_adagrad, scheduler=on_the_optimizer_that_was_handed_over
)
healthy_schedule = recipe(train_on_schedule, optimizer=adagrad, scheduler=on_the_optimizer_that_the_engine_has)
