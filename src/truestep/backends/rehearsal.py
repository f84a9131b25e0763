"""A rehearsal of FSDP2 in one process: DTensors of two ranks, without processes, to see what an optimizer makes of them.

Two ways. *Simulated*: both ranks' shards are held here and every collective is done on them, so that results are real. *Alone*:
rank 0 of two with collectives that do nothing, so that only what raises is real; for what the simulation does not know.

Both are made of torch's own debugging tools, of which the simulation is private (`torch.distributed._local_tensor`). A process in
which a process group is running cannot rehearse.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

RANKS: Final = 2
_SIMULATION: Final = "torch.distributed._local_tensor"
_SILENT: Final = "torch.testing._internal.distributed.fake_pg"


@dataclass(frozen=True)
class Stage:
    """Where DTensors are made and read.

    Attributes:
        mesh: Of two ranks.
        is_simulated: Collectives are done: values are what two ranks would have.
    """

    mesh: Any
    is_simulated: bool

    def shard(self, tensor: Tensor) -> Tensor:
        """Return a tensor of at least one dim as `fully_shard` would hold it: rows of dim 0, a copy."""
        # Made here, it is one tensor on each rank: the simulation would scatter one from outside as rank 0's alone.
        here = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        return distribute_tensor(here, self.mesh, [Shard(0)])

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a sharded tensor whole, as rank 0 has it; only where values are real."""
        held: Any = tensor.detach()
        full: Tensor = held.full_tensor() if isinstance(held, DTensor) else held
        local = getattr(full, "_local_tensors", None)
        return (full if local is None else local[0]).clone()


def obstacle() -> str:
    """Return why this process cannot rehearse, or nothing."""
    if not dist.is_available():
        return "torch.distributed is not available"
    if dist.is_initialized():
        return "a process group is running in this process"
    if importlib.util.find_spec(_SILENT) is None:
        return "this torch has no process group without processes"
    return ""


def can_simulate() -> bool:
    """Tell whether this torch can do the collectives of two ranks in one process."""
    return importlib.util.find_spec(_SIMULATION) is not None


@contextlib.contextmanager
def stage(*, simulated: bool) -> Iterator[Stage]:
    """Open a stage; when it closes, no process group is left."""
    silent: Any = importlib.import_module(_SILENT)
    dist.init_process_group("fake", store=silent.FakeStore(), rank=0, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        with contextlib.ExitStack() as around:
            if simulated:
                simulation: Any = importlib.import_module(_SIMULATION)
                around.enter_context(simulation.LocalTensorMode(RANKS))
            yield Stage(mesh, simulated)
    finally:
        dist.destroy_process_group()


def is_own(error: BaseException) -> bool:
    """Tell whether an error is the simulation's own, which two ranks would not have had."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "_local_tensor" in frames[-1].filename
