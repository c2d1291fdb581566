"""Peak memory of one call: the resident size of a fresh process on CPU, the allocator's count on CUDA.

The process creates the inputs, warms up the libraries with a tiny problem of the same kind, and makes one
call, which compiles and allocates permanent memory. Then it resets the high-water mark and measures the
second call. The result excludes the inputs. It includes the peer's mask, results and permanent memory.
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

_PATIENCE = 600.0  # Time limit of one call in a fresh process, in seconds.


def high_water_refusal() -> str | None:
    """Return the reason why this system cannot measure the peak of a call, or None."""
    try:
        forget_peak()
        resident_peak()
    except (OSError, KeyError) as error:
        return f"not measured: the high-water mark of resident memory cannot be reset ({error})"
    return None


def process_peak(peer: str, workload: Workload, mode: str, threads: int) -> int:
    """Measure the peak bytes above the inputs of a call on CPU, in a fresh process.

    Args:
        peer: Name of the peer.
        workload: The attention problem.
        mode: "forward" or "forward+backward".
        threads: Number of torch's threads.

    Raises:
        OptionError: There is no such peer.
        MeasurementError: The process failed.
    """
    peers_named([peer])
    task = {"peer": peer, "workload": to_plain(workload), "mode": mode, "threads": threads}
    found = fresh_process(f"memory of {peer}", __name__, task, remedy="Try --no-memory", timeout=_PATIENCE)
    return int(found)


def cuda_peak(peer: Peer, workload: Workload, mode: str) -> int:
    """Measure the peak bytes above the inputs of a call on CUDA."""
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
    """Measure the peak bytes above the inputs of a call on CPU, in this process. Use a fresh process.

    Raises:
        OSError: The high-water mark cannot be reset (see `high_water_refusal`).
    """
    # The tiny problem has the same kind of mask: a peer may support only documents.
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
