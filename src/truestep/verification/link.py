"""How records travel from the ranks to the reference: a local socket that only this run's processes can speak on."""

from __future__ import annotations

import io
import os
import pickle
import secrets
import sys
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final

import torch

from truestep.words.errors import VerifyError

PATH_BYTES: Final = 100  # a socket's path has room for little more


@dataclass(frozen=True)
class Address:
    """Where the reference listens, and the key that both sides must know."""

    path: str
    key: bytes


def address(folder: Path) -> Address:
    """Return a fresh address in a private folder, which is removed with all that is in it."""
    name = f"{secrets.token_hex(4)}.link"
    path = str(folder / name)
    if len(os.fsencode(path)) > PATH_BYTES and sys.platform == "linux":
        path = f"\0{folder.name}/{name}"  # a name without a file
    return Address(path, secrets.token_bytes(32))


def listen(where: Address) -> Listener:
    """Listen, on the reference's side."""
    return Listener(where.path, family="AF_UNIX", backlog=64, authkey=where.key)


def connect(where: Address, timeout: float = 60.0) -> Connection:
    """Connect, on a rank's side; waits until the reference listens."""
    import time

    deadline = time.monotonic() + timeout
    while True:
        try:
            return Client(where.path, family="AF_UNIX", authkey=where.key)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class HungUp(Exception):
    """The reference no longer listens: it has failed, which is the launcher's to tell."""


def send(connection: Connection, message: Any) -> None:
    """Send one message; blocks while the other side is behind.

    Raises:
        HungUp: If the other side is gone.
        VerifyError: If it does not pickle.
    """
    buffer = io.BytesIO()
    try:
        torch.save(message, buffer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise VerifyError(
            f"what this step made cannot be sent to the reference: {error}. Yield batches of tensors and plain data, or of "
            "classes at the top level of their module."
        ) from error
    try:
        connection.send_bytes(buffer.getbuffer())
    except (BrokenPipeError, ConnectionResetError) as error:
        raise HungUp from error


def receive(connection: Connection) -> Any:
    """Receive one message, from a process of this run that knows the key."""
    return torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
