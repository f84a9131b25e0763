"""Loops over FSDP2's `fully_shard` as people write them: some right, some with one fault."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tiny import GLOBAL_TOKENS, adagrad, adamw, errors, loss, num_tokens, padded_batches, program, recipe, sgd
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint


def backward_all(model, batches):
    """Run the window's backward passes right: reduced once, in the last one."""
    total = 0.0
    for index, batch in enumerate(batches):
        model.set_requires_gradient_sync(index == len(batches) - 1)
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
        if index == len(batches) - 1:
            optimizer.zero_grad()
        (loss(model, batch) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


@program()
def never_reduces(model, optimizer, batches):
    model.set_requires_gradient_sync(False)
    for batch in batches:
        (loss(model, batch) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


@program()
def does_not_divide_by_the_micro_batches(model, optimizer, batches):
    for batch in batches:
        loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


# --- reduction by sum


def summed(model, backend):
    for module in [*model.layers, model]:
        fully_shard(module)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return model


@program(wrap=summed)
def sums_a_mean_loss(model, optimizer, batches):
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()


def sum_over_global_tokens(model, batch):
    return errors(model, batch).sum() / GLOBAL_TOKENS


def train_on_the_sum(model, optimizer, batches):
    for batch in batches:
        sum_over_global_tokens(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


healthy_sum = recipe(train_on_the_sum, loss=sum_over_global_tokens, wrap=summed)
healthy_sum_of_counted_items = recipe(train_on_the_sum, loss=sum_over_global_tokens, wrap=summed, num_items=num_tokens)


def plain_sum(model, batch):
    return errors(model, batch).sum()


@program(loss=plain_sum, batches=padded_batches, num_items=num_tokens, reduction="sum", wrap=summed)
def healthy_sum_of_padded(model, optimizer, batches):
    tokens = torch.tensor(float(sum(map(num_tokens, batches))))
    dist.all_reduce(tokens)
    for batch in batches:
        (plain_sum(model, batch) / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


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


# --- the optimizer and the model it holds


def sharded_after_the_optimizer(model, backend):
    """Wrap as a script does that builds the optimizer first."""
    global built_too_early
    built_too_early = adamw(model.named_parameters())
    return shard(model)


def shard(model, **settings):
    for module in [*model.layers, model]:
        fully_shard(module, **settings)
    return model


@program(
    wrap=sharded_after_the_optimizer,
    optimizer=lambda named_params: built_too_early,
    reference_optimizer=adamw,
)
def builds_the_optimizer_before_sharding(model, optimizer, batches):
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()


def watch_loss(model, batch):
    with torch.no_grad():
        return errors(model, batch).mean().item()


@program()
def looks_at_the_loss_between_backward_and_step(model, optimizer, batches):
    backward_all(model, batches)
    watch_loss(model, batches[0])
    optimizer.step()
    optimizer.zero_grad()


@program()
def healthy_look_that_reshards(model, optimizer, batches):
    backward_all(model, batches)
    watch_loss(model, batches[0])
    model.reshard()
    optimizer.step()
    optimizer.zero_grad()


@program()
def healthy_look_after_the_step(model, optimizer, batches):
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()
    watch_loss(model, batches[0])


@program(max_norm=0.5)
def clips_before_the_last_backward(model, optimizer, batches):
    for index, batch in enumerate(batches):
        if index == len(batches) - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        (loss(model, batch) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


@program(max_norm=0.5)
def clips_each_rank_by_its_own_norm(model, optimizer, batches):
    backward_all(model, batches)
    gradients = [param.grad.to_local() for param in model.parameters()]
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients]))
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.5 / (norm.item() + 1e-6)))
    optimizer.step()
    optimizer.zero_grad()


@program(max_norm=0.5)
def clips_by_the_norm_of_its_own_shards(model, optimizer, batches):
    backward_all(model, batches)
    norm = get_total_norm([param.grad.to_local() for param in model.parameters()])
    clip_grads_with_norm_(model.parameters(), 0.5, norm)
    optimizer.step()
    optimizer.zero_grad()


@program(max_norm=0.5)
def healthy_and_clipped_by_a_norm_made_whole(model, optimizer, batches):
    backward_all(model, batches)
    norm = get_total_norm([param.grad for param in model.parameters()]).full_tensor()
    clip_grads_with_norm_(model.parameters(), 0.5, norm)
    optimizer.step()
    optimizer.zero_grad()


@program()
def edits_a_gradient(model, optimizer, batches):
    backward_all(model, batches)
    model.head.weight.grad.to_local()[0].add_(0.125)
    optimizer.step()
    optimizer.zero_grad()


@program(optimizer=adagrad)
def zeroes_its_state_before_each_window(model, optimizer, batches):
    for state in optimizer.state.values():
        state["sum"].zero_()
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()


@program()
def parks_moments_in_bf16_each_step(model, optimizer, batches):
    backward_all(model, batches)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].copy_(state[key].bfloat16())


# --- ways to shard, all right


def kept_gathered(model, backend):
    return shard(model, reshard_after_forward=False)


def resharded(model, backend):
    return shard(model, reshard_after_forward=True)


def resharded_to_two(model, backend):
    return shard(model, reshard_after_forward=2)


def columns_where_they_divide(model, backend):
    size = dist.get_world_size()
    return shard(model, shard_placement_fn=lambda param: Shard(1) if param.dim() > 1 and param.shape[1] % size == 0 else None)


def recomputed(model, backend):
    """Recompute each layer's activations in the backward."""
    for layer in model.layers:
        plain = layer.forward
        layer.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    return shard(model)


def only_the_root(model, backend):
    wrapped = fully_shard(model)
    return wrapped if isinstance(wrapped, FSDPModule) else model


def train(model, optimizer, batches):
    optimizer.zero_grad()
    total = backward_all(model, batches)
    optimizer.step()
    return total


healthy_kept_gathered = recipe(train, wrap=kept_gathered)
healthy_resharded = recipe(train, wrap=resharded)
healthy_resharded_to_two = recipe(train, wrap=resharded_to_two)
healthy_columns = recipe(train, wrap=columns_where_they_divide)
healthy_recomputed = recipe(train, wrap=recomputed)
healthy_root_alone = recipe(train, wrap=only_the_root)
