"""Micro-batches a second with gradients reduced once a window against in every micro-batch: bytes-gpt under FSDP2, 2 ranks.

    python benchmarks/accumulate.py [WINDOWS]

Rounds of both modes take turns, so that a machine that slows down slows both; the medians are compared.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

K, ROUNDS, RANKS = 8, 5, 2


def main(windows: int) -> None:
    """Time both modes on this rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    import truestep as ts
    from truestep.backends.dtensor import shard
    from truestep.verification.recipe import load

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recipe = load("bytes-gpt")
    model = shard(recipe.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(recipe.batches(dist.get_rank(), RANKS))
    accumulators = {mode: ts.Accumulator(model, optimizer, micro_batches=K, sync=mode) for mode in ("every", "last")}
    seconds: dict[str, list[float]] = {mode: [] for mode in accumulators}
    for number in range(ROUNDS + 1):
        for mode, acc in accumulators.items():
            drawn = [next(batches) for _ in range(K * windows)]
            dist.barrier()
            began = time.perf_counter()
            for window in acc.windows(drawn):
                for batch in window:
                    window.backward(recipe.loss(model, batch))
                window.step()
            dist.barrier()
            if number:  # the first round warms up
                seconds[mode].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        rates = {mode: K * windows / statistics.median(taken) for mode, taken in seconds.items()}
        params = sum(param.numel() for param in recipe.model().parameters())
        print(f"bytes-gpt, {params:,} params, FSDP2, {RANKS} ranks, K = {K}, median of {ROUNDS} rounds of {windows} windows")
        for mode, rate in rates.items():
            print(f"{mode:6} {rate:7.2f} micro-batches/s   {accumulators[mode].describe().partition('; ')[2]}")
        print(f"last / every {rates['last'] / rates['every']:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    import os

    asked = int(sys.argv[1]) if sys.argv[1:] else 4
    if "RANK" in os.environ:
        main(asked)
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
        sys.exit(subprocess.run([*launcher, __file__, str(asked)], check=False).returncode)
