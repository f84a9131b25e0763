"""The recorder on one process: it sees what backward passes accumulate, and nothing else."""

import torch
from torch import nn

from truestep.backends import base
from truestep.verification.record import Recorder


def test_what_torch_autograd_grad_computes_is_not_taken_for_a_backward():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    session = base.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    recorder = Recorder(session, frozenset())
    values = torch.arange(6.0).reshape(2, 3)
    with recorder.step(1, 0, [values]) as record:
        torch.autograd.grad(model(values).sum(), list(model.parameters()))
        model(values).square().sum().backward()
    recorder.close()
    seen = [micro_batch.gradients for micro_batch in record.micro_batches if micro_batch.gradients]
    assert len(seen) == 1
    assert {name: gradient.tolist() for name, gradient in seen[0].items()} == {
        name: param.grad.tolist() for name, param in model.named_parameters()
    }
