"""attnspan.jax compared with attnspan.torch and with JAX's own attention: python benchmarks/jax_attention.py

Each line is a paired ratio of alternating times with its interval: the speedup of attnspan.jax over the peer.
Forward and backward, float32. Then it measures memory: 65,536 causal tokens in a fresh process, where the
scores of jax.nn.dot_product_attention would not fit. `--json FILE` writes the raw samples.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch

from attnspan_lab.bench.cells import Timing, Workload
from attnspan_lab.bench.environment import describe_environment
from attnspan_lab.bench.memory import high_water_refusal, process_peak
from attnspan_lab.bench.peers import Job, peers_by_name
from attnspan_lab.bench.peers.jax_peers import start_jax
from attnspan_lab.bench.runner import BOUNDS, difference
from attnspan_lab.bench.statistics import Interval
from attnspan_lab.bench.timing import Budget, Meter, Subject, first_call, interleave
from attnspan_lab.bench.workloads import builtin, select
from attnspan_lab.files import write_json

OURS = "attnspan-jax"
PEERS = ("attnspan", "jax")
NAMES = ("causal-d64", "documents-32")
MODE = "forward+backward"


@dataclass(frozen=True)
class Found:
    """Times of one workload and peer. The ratio is the peer's time over attnspan's."""

    workload: str
    peer: str
    reason: str | None = None
    execute: Timing | None = None
    pipelined: Timing | None = None
    ratio: Interval | None = None


@dataclass
class Record:
    """Results of a run."""

    environment: dict[str, object]
    found: list[Found] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    inputs: int = 0
    scores: int = 0


def measure(workload: Workload, budget: Budget) -> list[Found]:
    """Time attnspan in turn with each peer."""
    job = Job.make(workload, MODE, "cpu")
    found, subjects, expected = [], [], None
    for name in (OURS, *PEERS):
        peer = peers_by_name()[name]
        reason = peer.refuses(job)
        if reason is not None:
            found.append(Found(workload.name, name, reason))
            if name == OURS:  # Ratios are relative to attnspan.
                return found
            continue
        ready = peer.prepare(job)
        subject = Subject(name, ready.call, ready.device, ready.around)
        result, _ = first_call(subject, Meter())
        arrays = [x.detach() for x in ready.to_torch(result)]
        expected = arrays if expected is None else expected
        error = difference(expected, arrays)
        assert error <= BOUNDS[workload.dtype], f"{name} computes a different result: {error}"
        subjects.append(subject)
    # Synchronize after each call: a training step waits as well, and torch's CPU calls are synchronous.
    timed = interleave(subjects, budget, Meter(threads=torch.get_num_threads()))
    return found + [Found(workload.name, m.peer, None, m.execute, m.pipelined, m.ratio) for m in timed]


def show(found: Found) -> str:
    name = f"{found.workload:<14} {found.peer:<13}"
    if found.execute is None:
        return f"{name} not: {found.reason}"
    text = f"{name} {found.execute.median * 1e3:10.2f} ms  spread {found.execute.spread:4.0%}"
    if found.ratio is not None:
        r = found.ratio
        text += f"  ours is {r.median:6.2f}x as fast ({r.low:.2f} to {r.high:.2f}, {r.pairs} pairs)"
    return text


def show_memory(record: Record, length: int) -> None:
    """Measure a call's peak memory above its inputs in fresh processes, and estimate a dense peer's."""
    refusal = high_water_refusal()
    if refusal is not None:
        print(f"memory {refusal}")
        return
    threads, scale = torch.get_num_threads(), length // 4
    for rows in (scale, length):
        work = long_of(rows)
        record.peaks[work.name] = process_peak(OURS, work, MODE, threads, timeout=1800)
        print(f"{work.name:<14} peak {record.peaks[work.name] / 2**20:8.1f} MiB above the inputs")
    record.inputs, record.scores = 4 * 4 * length * 64, 4 * length * length
    grown = record.peaks[f"causal-{length}"] / max(1, record.peaks[f"causal-{scale}"])
    print(f"four times the length: {grown:.2f}x the memory; the square would be 16x")
    # Forward stores scores and probabilities. Backward stores the gradients of both.
    print(
        f"jax.nn.dot_product_attention stores {4 * record.scores / 2**30:.0f} GiB of scores: "
        f"{peers_by_name()['jax'].refuses(Job.make(long_of(length), MODE, 'cpu')) or 'they fit here'}"
    )


def long_of(length: int) -> Workload:
    return Workload(f"causal-{length}", "long", 1, 1, 1, length, length, 64, 64, "float32", "causal")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=20.0, help="seconds for each peer")
    options.add_argument(
        "--workloads", default=",".join(NAMES), help="names from attnspan bench --list ('' for none)"
    )
    options.add_argument(
        "--length", type=int, default=65536, help="tokens of the memory measurement (0: none)"
    )
    options.add_argument("--json", type=Path, help="write raw samples to this file")
    given = options.parse_args()
    # JAX sizes its thread pool when it starts.
    start_jax(torch.get_num_threads())
    record = Record(describe_environment())
    names = [name for name in given.workloads.split(",") if name]
    for workload in select(builtin(), names, dtypes=["float32"]) if names else ():
        for found in measure(workload, Budget(given.seconds)):
            record.found.append(found)
            print(show(found), flush=True)
    if given.length:
        show_memory(record, given.length)
    if given.json is not None:
        write_json(given.json, record)


if __name__ == "__main__":
    main()
