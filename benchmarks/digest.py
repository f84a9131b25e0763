"""How fast content digests are: GB/s by dtype, and by how the piece lies in its tensor.

    python benchmarks/digest.py [MEBIBYTES]

Prints one line a case with the best of several runs, on 1 thread and on all that torch uses. The issue asks for 0.4 GB/s on 2.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from truestep.state.digest import lanes
from truestep.words.shards import Box, whole

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
ROWS = 4096
RUNS = 7


def best_s(act: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several runs, after one to warm up."""
    act()
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def cases(mebibytes: int) -> Iterator[tuple[str, Tensor, Box, tuple[int, ...]]]:
    """Yield ``(what, piece, its box, shape of the whole)``."""
    for dtype in DTYPES:
        octets = torch.randint(0, 256, (mebibytes << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        flat = octets.view(dtype)
        yield f"{dtype} whole", flat, whole(tuple(flat.shape)), tuple(flat.shape)
        if dtype.itemsize < 4:
            yield f"{dtype} cut inside a word", flat[1:-1], Box((1,), (len(flat) - 1,)), tuple(flat.shape)
        table = flat.view(ROWS, -1)
        for parts in (2, 8):
            width = table.shape[1] // parts
            piece = table[:, width : 2 * width].contiguous()
            yield f"{dtype} 1/{parts} of dim 1", piece, Box((0, width), (ROWS, 2 * width)), tuple(table.shape)
    yield "torch.float32 0-d (microseconds)", torch.tensor(1.5), whole(()), ()


def main() -> None:
    """Print the table."""
    mebibytes = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    threads = torch.get_num_threads()
    print(f"{'GB/s':36s}{'1 thread':>12s}{f'{threads} threads':>12s}")
    for what, piece, box, shape in cases(mebibytes):
        figures = []
        for count in (1, threads):
            torch.set_num_threads(count)
            seconds = best_s(lambda piece=piece, box=box, shape=shape: lanes(piece, box, shape))
            figures.append(piece.nbytes / seconds / 1e9 if shape else seconds * 1e6)
        print(f"{what:36s}" + "".join(f"{figure:12.2f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
