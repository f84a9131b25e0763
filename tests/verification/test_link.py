"""The socket between ranks and reference: what travels, what does not, and where it may lie."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from truestep.verification import link
from truestep.words.errors import VerifyError


def connected(folder):
    """Return both ends of a link in a folder."""
    where, ends = link.address(folder), []
    with link.listen(where) as listener:
        thread = threading.Thread(target=lambda: ends.append(link.connect(where)))
        thread.start()
        theirs = listener.accept()
        thread.join()
    return ends[0], theirs


@pytest.mark.parametrize("depth", [1, 9])
def test_a_message_arrives_however_long_the_path_of_the_folder_is(depth, tmp_path):
    folder = tmp_path.joinpath(*["a-folder-of-a-user"] * depth)
    folder.mkdir(parents=True)
    mine, theirs = connected(folder)
    with mine, theirs:
        link.send(mine, {"step": 3, "weight": torch.arange(6.0).view(2, 3)})
        message = link.receive(theirs)
    assert message["step"] == 3
    assert torch.equal(message["weight"], torch.arange(6.0).view(2, 3))


def test_what_does_not_pickle_is_told_with_what_to_yield(tmp_path):
    mine, theirs = connected(tmp_path)
    with mine, theirs, pytest.raises(VerifyError, match="cannot be sent to the reference: .*lambda.* Yield batches of tensors"):
        link.send(mine, lambda: None)


def test_a_side_that_is_gone_is_a_hang_up(tmp_path):
    mine, theirs = connected(tmp_path)
    theirs.close()
    with mine, pytest.raises(link.HungUp):
        link.send(mine, torch.zeros(200_000))


def test_every_address_is_its_own_with_its_own_key():
    one, other = link.address(Path("/run")), link.address(Path("/run"))
    assert one.path != other.path
    assert one.key != other.key
