"""Loops over DistributedDataParallel whose fault, if they have one, lies between backward and step, or between two steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tiny import adagrad, loss, program
from with_ddp import backward_all, is_last

# --- between backward and step


@program(max_norm=0.5)
def clips_before_the_last_backward(model, optimizer, batches):
    for index, batch in enumerate(batches):
        if is_last(index, batches):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        (loss(model, batch) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


@program(max_norm=0.5)
def clips_twice(model, optimizer, batches):
    backward_all(model, batches)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    optimizer.zero_grad()


@program(max_norm=0.5)
def clips_at_another_norm(model, optimizer, batches):
    backward_all(model, batches)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()


@program(max_norm=0.5)
def clips_every_param_by_itself(model, optimizer, batches):
    backward_all(model, batches)
    for param in model.parameters():
        torch.nn.utils.clip_grad_norm_(param, 0.5)
    optimizer.step()
    optimizer.zero_grad()


@program(max_norm=0.5)
def clips_the_head_alone(model, optimizer, batches):
    backward_all(model, batches)
    torch.nn.utils.clip_grad_norm_(model.module.head.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


@program(max_norm=0.5)
def clips_on_one_rank_only(model, optimizer, batches):
    backward_all(model, batches)
    if dist.get_rank() == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


@program(max_norm=0.5)
def edits_a_gradient_after_clipping(model, optimizer, batches):
    backward_all(model, batches)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    model.module.head.weight.grad[0].mul_(2.0)
    optimizer.step()
    optimizer.zero_grad()


@program(max_norm=0.5)
def healthy_and_clipped_twice_alike(model, optimizer, batches):
    """Clip at the same norm again, which changes nothing that can be seen."""
    backward_all(model, batches)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


@program()
def edits_a_gradient(model, optimizer, batches):
    backward_all(model, batches)
    model.module.head.weight.grad[0].add_(0.125)
    optimizer.step()
    optimizer.zero_grad()


@program()
def never_steps(model, optimizer, batches):
    backward_all(model, batches)
    optimizer.zero_grad()


skipped_steps = iter((False, True, False, False))


@program()
def skips_the_second_step(model, optimizer, batches):
    backward_all(model, batches)
    if not next(skipped_steps):
        optimizer.step()
    optimizer.zero_grad()


def zero_state(optimizer):
    for state in optimizer.state.values():
        for key in ("sum", "exp_avg", "exp_avg_sq", "momentum_buffer"):
            if key in state:
                state[key].zero_()


def park_state_in_bf16(optimizer):
    for state in optimizer.state.values():
        for key in ("sum", "exp_avg", "exp_avg_sq", "momentum_buffer"):
            if key in state:
                state[key].copy_(state[key].bfloat16())


@program(optimizer=adagrad)
def zeroes_its_state_before_each_window(model, optimizer, batches):
    zero_state(optimizer)
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()


@program()
def parks_moments_in_bf16_each_step(model, optimizer, batches):
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()
    park_state_in_bf16(optimizer)


@program()
def edits_a_weight_on_one_rank(model, optimizer, batches):
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        model.module.head.bias.data[2] += 0.5


@program()
def steps_on_one_rank_only(model, optimizer, batches):
    backward_all(model, batches)
    if dist.get_rank() == 0:
        optimizer.step()
    optimizer.zero_grad()


def some_params(named_params):
    """Build the optimizer of all but the head: an easily forgotten list of modules."""
    return torch.optim.AdamW([param for name, param in named_params if not name.startswith("head")], lr=1e-2)


@program(optimizer=some_params)
def forgets_the_head(model, optimizer, batches):
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()


# --- learning rates


step_numbers = iter(range(1, 1000))


@program()
def healthy_rate_set_by_hand(model, optimizer, batches):
    """Warm up by hand, as small training scripts do."""
    number = next(step_numbers)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * min(1.0, number / 3)
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()


def halved_each_step(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@program(scheduler=halved_each_step)
def steps_its_schedule_in_every_micro_batch(model, optimizer, batches, scheduler):
    for batch in batches:
        (loss(model, batch) / len(batches)).backward()
        scheduler.step()
    optimizer.step()
    optimizer.zero_grad()


@program(scheduler=halved_each_step)
def healthy_schedule(model, optimizer, batches, scheduler):
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
