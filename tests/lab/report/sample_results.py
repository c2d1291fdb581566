"""Results that have something to show in every section of the page."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

from attnspan_lab.bench.cells import Ceilings, Cell, Run, Timing, Workload
from attnspan_lab.bench.results import Evaluation, MonitorRecord, PhaseShares, Results, TrainingCell
from attnspan_lab.bench.statistics import Samples, paired

CEILINGS = Ceilings(
    {"fma_f32": 2.06e11, "dot_bf16": 4.1e11}, 1.84e10, {"fma_f32": "2 threads", "read_bandwidth": "1 GiB"}
)
ENVIRONMENT = {
    "cpu": "Intel Xeon (a made-up one)",
    "memory_bytes": 16 * 2**30,
    "load_average": [0.123456789, 0.5],
    "versions": {"torch": "2.13.0+cpu", "tokamax": None},
}
# Peer -> its time over attnspan's. flex is faster.
PEERS = {"sdpa-flash": 1.45, "sdpa-dense-mask": 3.1, "flex": 0.8, "jax": 4.2}


def sample_results() -> Results:
    """Cells of four families in two modes and dtypes, a training, and the steps of a monitor."""
    draw = random.Random(0)
    sizes = [("grid", "full", n, n) for n in (128, 1024, 4096, 16384)]
    sizes += [("grid", "causal", n, n) for n in (128, 1024, 4096, 16384)]
    sizes += [("documents", "causal & packed(32)", 8192, 8192)]
    sizes += [("decode", "causal", 1, n) for n in (8192, 65536)] + [("long", "window(9)", 2048, 2048)]
    works = [
        Workload(f"{family}-{mask.split()[0]}-s{k_len}", family, 1, 8, 8, q_len, k_len, dim, dim, dtype, mask)
        for dtype, dim, (family, mask, q_len, k_len) in product(("float32", "bfloat16"), (64, 128), sizes)
    ]
    works = [replace(work, name=f"{work.name}-d{work.head_dim}") for work in works]
    cells = [_cell(work, mode, draw) for work in works for mode in ("forward", "forward+backward")]
    held_out = (Evaluation(0, 5.6), Evaluation(120, 2.9))
    return Results(ENVIRONMENT, CEILINGS, tuple(cells), training(), monitor=monitor(), evaluations=held_out)


def _cell(work: Workload, mode: str, draw: random.Random) -> Cell:
    pairs = 8 * work.q_len * work.k_len
    seconds = pairs * 4e-9 + 1e-5
    ours = tuple(seconds * draw.lognormvariate(0, 0.02) for _ in range(15))
    runs = [Run("attnspan", execute=Timing(ours), peak_memory=65536, note="backend cpu")]
    for peer, factor in PEERS.items():
        if peer == "sdpa-flash" and work.family == "documents":
            runs.append(Run(peer, reason="its kernel knows no mask but the causal one"))
            continue
        noisy = draw.random() < 0.1
        theirs = tuple(x * factor * draw.lognormvariate(0, 0.2 if noisy else 0.02) for x in ours)
        times = {"execute": Timing(theirs), "ratio": paired(ours, theirs), "noisy": noisy}
        runs.append(Run(peer, peak_memory=2**20 + work.k_len, compile_seconds=1.0, **times))
    runs.append(Run("tokamax", reason="it is not installed: pip install tokamax"))
    return Cell(work, mode, pairs, 256.0 * pairs, 1e4 * work.k_len, tuple(runs))


def training() -> tuple[TrainingCell, ...]:
    """The reference job with three attentions, one of which could not run."""
    ours, theirs = (0.41,) * 9, (0.73,) * 9
    sdpa = TrainingCell("sdpa", None, Timing(theirs), Samples((11222.0,)), 2**31, paired(ours, theirs), True)
    return (
        TrainingCell("attnspan", None, Timing(ours), Samples((19980.0,)), 2**30, note="8,192 tokens a step"),
        sdpa,
        TrainingCell("sdpa-documents", reason="the lengths of documents are not known to the compiler"),
    )


def monitor(steps: int = 120) -> tuple[MonitorRecord, ...]:
    """A training whose first step compiles."""
    draw = random.Random(2)
    known = {"attention_seconds": 0.11, "attention_flops": 2.4e10, "ceiling": 4.1e11, "utilisation": 0.9}
    shares = PhaseShares(0.05, 0.05, 0.3, 0.5, 0.1)
    first = MonitorRecord(1, 6.4, 8192, shares, compile_seconds=6.0, memory=2**30, loss=5.5, **known)
    later = (replace(first, step=n, seconds=0.4, compile_seconds=0.0) for n in range(2, steps + 1))
    return (first, *(replace(x, loss=2.5 + 3 / x.step**0.5 + draw.gauss(0, 0.2)) for x in later))
