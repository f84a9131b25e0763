"""A number that a device is still to compute, read by the host without waiting for what is queued after it."""

from __future__ import annotations

import torch
from torch import Tensor


class Later:
    """What a 0-d tensor is now, on its way to the host.

    Note: why an event
        ``float(tensor)`` waits for everything that is queued on the device by then. The copy is queued now, into pinned memory,
        and its event is over as soon as the copy is: the tensor is kept until then, as its memory must not be reused before.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._kept = tensor.detach().clone()
        self._value = self._kept
        self._event: torch.Event | None = None
        if tensor.device.type != "cpu":
            self._value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._value.copy_(self._kept, non_blocking=True)
            self._event = torch.Event(tensor.device)
            self._event.record()

    def read(self) -> float:
        """Return the number, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)
