"""Jobs that show what a world does with ranks that answer, raise, die or hang."""

import os
import signal
import time

import torch
import torch.distributed as dist


def add_ranks() -> float:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return float(total)


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"no such luck on {rank}")
    dist.barrier()


def die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    return "nothing noticed"


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)
