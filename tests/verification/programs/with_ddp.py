"""Loops over DistributedDataParallel as people write them: some right, some with one fault."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from tiny import GLOBAL_TOKENS, errors, loss, num_tokens, padded_batches, program, recipe, sgd
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
