"""Peak memory of one call: on CPU the resident size of a fresh process, on CUDA the allocator's own count.

The process makes the inputs, warms the libraries up on a tiny problem of the same kind, and makes one call,
which compiles and allocates what is kept. Then the high-water mark is reset and the second call is measured:
above the inputs, with the peer's mask, its results and whatever it keeps.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from attnspan.masks import documents
from attnspan_lab.bench.cells import Workload
from attnspan_lab.bench.peers import Job, Peer, peers_by_name, peers_named
from attnspan_lab.bench.processes import (
    forget_peak,
    fresh_process,
    resident_memory,
    resident_peak,
    trim,
)
from attnspan_lab.bench.workloads import mask_of
from attnspan_lab.files import from_plain, to_plain

__all__ = ["cuda_peak", "high_water_refusal", "peak_here", "process_peak"]

_PATIENCE = 600.0  # Seconds for one call in a fresh process.


def high_water_refusal() -> str | None:
    """None, or why this system cannot tell the peak of a call."""
    try:
        forget_peak()
        resident_peak()
    except (OSError, KeyError) as error:
        return f"not measured: the high-water mark of resident memory cannot be reset ({error})"
    return None


def process_peak(peer: str, workload: Workload, mode: str, threads: int) -> int:
    """Peak bytes above the inputs of a call on CPU, in a fresh process.

    Args:
        peer: Name of the peer.
        workload: What it computes.
        mode: "forward" or "forward+backward".
        threads: Threads of torch.

    Raises:
        OptionError: There is no such peer.
        MeasurementError: The process failed.
    """
    peers_named([peer])
    task = {"peer": peer, "workload": to_plain(workload), "mode": mode, "threads": threads}
    found = fresh_process(f"memory of {peer}", __name__, task, remedy="Try --no-memory", timeout=_PATIENCE)
    return int(found)


def cuda_peak(peer: Peer, workload: Workload, mode: str) -> int:
    """Peak bytes above the inputs of a call on CUDA."""
    job = Job.make(workload, mode, "cuda")
    torch.cuda.synchronize()
    inputs = torch.cuda.memory_allocated()
    ready = peer.prepare(job)
    with ready.around():
        ready.device.synchronize(ready.call())
        torch.cuda.reset_peak_memory_stats()
        ready.device.synchronize(ready.call())
    return torch.cuda.max_memory_allocated() - inputs


def peak_here(peer: Peer, workload: Workload, mode: str) -> int:
    """Peak bytes above the inputs of a call on CPU, in this process, which should be a fresh one.

    Raises:
        OSError: The high-water mark cannot be reset (see `high_water_refusal`).
    """
    # Of the same kind: a peer may know documents and nothing else.
    packed = any(isinstance(leaf, documents) for leaf in mask_of(workload).leaves())
    tiny = replace(workload, q_len=16, k_len=16, mask="packed(2)" if packed else "full")
    warm = peer.prepare(Job.make(tiny, mode, "cpu"))
    warm.device.synchronize(warm.call())
    del warm
    job = Job.make(workload, mode, "cpu")
    trim()
    inputs = resident_memory()
    assert inputs is not None, "`high_water_refusal` is asked first"
    ready = peer.prepare(job)
    with ready.around():
        ready.device.synchronize(ready.call())
        trim()
        forget_peak()
        result = ready.call()
        ready.device.synchronize(result)
    return max(0, resident_peak() - inputs)


def _main(task: dict[str, Any]) -> None:
    torch.set_num_threads(task["threads"])
    workload = from_plain(Workload, task["workload"], "workload")
    print(peak_here(peers_by_name()[task["peer"]], workload, task["mode"]))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
