"""Loops over DistributedDataParallel as people write them: some right, some with one fault."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from tiny import GLOBAL_TOKENS, adagrad, errors, loss, num_tokens, padded_batches, program, recipe, sgd
from torch.nn.parallel import DistributedDataParallel


def is_last(index, batches):
    return index == len(batches) - 1


def backward_all(model, batches):
    """Run the window's backward passes right: reduced once, in the last one."""
    total = 0.0
    for index, batch in enumerate(batches):
        with nullcontext() if is_last(index, batches) else model.no_sync():
            part = loss(model, batch) / len(batches)
            part.backward()
        total += part.item()
    return total


@program()
def healthy(model, optimizer, batches):
    optimizer.zero_grad()
    total = backward_all(model, batches)
    optimizer.step()
    return total


@program(optimizer=sgd)
def healthy_and_reduced_in_every_micro_batch(model, optimizer, batches):
    for batch in batches:
        (loss(model, batch) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


@program(max_norm=0.5)
def healthy_and_clipped(model, optimizer, batches):
    optimizer.zero_grad()
    total = backward_all(model, batches)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return total


@program()
def steps_in_every_micro_batch(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        (loss(model, batch) / len(batches)).backward()
        optimizer.step()


@program()
def clears_before_the_last_micro_batch(model, optimizer, batches):
    for index, batch in enumerate(batches):
        if is_last(index, batches):
            optimizer.zero_grad()
        with nullcontext() if is_last(index, batches) else model.no_sync():
            (loss(model, batch) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


@program()
def never_clears(model, optimizer, batches):
    backward_all(model, batches)
    optimizer.step()


@program()
def stays_in_no_sync(model, optimizer, batches):
    with model.no_sync():
        backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()


@program()
def calls_the_raw_module(model, optimizer, batches):
    for batch in batches:
        (loss(model.module, batch) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


@program()
def does_not_divide_by_the_micro_batches(model, optimizer, batches):
    for batch in batches:
        loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


@program()
def divides_by_the_micro_batches_twice(model, optimizer, batches):
    backward_all(model, batches)
    for param in model.parameters():
        param.grad /= len(batches)
    optimizer.step()
    optimizer.zero_grad()


# --- reduction by sum


def summed(model, backend):
    """Wrap by DDP, with a communication hook that sums and does not divide."""

    def total(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    total.__annotations__.clear()  # DDP does not know them as the strings that they are here
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, total)
    return wrapped


@program(wrap=summed)
def sums_a_mean_loss(model, optimizer, batches):
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()


def sum_over_global_tokens(model, batch):
    return errors(model, batch).sum() / GLOBAL_TOKENS


def train_on_the_sum(model, optimizer, batches):
    for index, batch in enumerate(batches):
        with nullcontext() if is_last(index, batches) else model.no_sync():  # a sum, unlike a mean, may not be reduced twice
            sum_over_global_tokens(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


healthy_sum = recipe(train_on_the_sum, loss=sum_over_global_tokens, wrap=summed)
healthy_sum_of_counted_items = recipe(train_on_the_sum, loss=sum_over_global_tokens, wrap=summed, num_items=num_tokens)


def plain_sum(model, batch):
    return errors(model, batch).sum()


def train_on_the_plain_sum(model, optimizer, batches):
    tokens = torch.tensor(float(sum(map(num_tokens, batches))))
    dist.all_reduce(tokens)
    for batch in batches:
        (plain_sum(model, batch) * dist.get_world_size() / tokens).backward()  # DDP divides by the ranks again
    optimizer.step()
    optimizer.zero_grad()


healthy_sum_of_padded = recipe(
    train_on_the_plain_sum, loss=plain_sum, batches=padded_batches, num_items=num_tokens, reduction="sum"
)


@program(loss=plain_sum, batches=padded_batches, num_items=num_tokens, reduction="sum")
def forgets_that_ddp_divides_by_the_ranks(model, optimizer, batches):
    tokens = torch.tensor(float(sum(map(num_tokens, batches))))
    dist.all_reduce(tokens)
    for batch in batches:
        (plain_sum(model, batch) / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


# --- unequal numbers of items


@program(batches=padded_batches, num_items=num_tokens)
def means_the_means(model, optimizer, batches):
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()


@program(batches=padded_batches, num_items=num_tokens)
def healthy_weights(model, optimizer, batches):
    tokens = torch.tensor(float(sum(map(num_tokens, batches))))
    dist.all_reduce(tokens)
    for batch in batches:
        (loss(model, batch) * num_tokens(batch) * dist.get_world_size() / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


@program(batches=padded_batches, num_items=num_tokens)
def weighs_by_the_tokens_of_its_own_rank(model, optimizer, batches):
    tokens = sum(map(num_tokens, batches))
    for batch in batches:
        (loss(model, batch) * num_tokens(batch) / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


# --- between backward and step, and between two steps


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
def parks_moments_in_bf16_after_each_step(model, optimizer, batches):
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
