"""Results as a small machine could have given them: every section of the page has something to show."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import product

from attnspan_lab.bench.cells import Ceilings, Cell, Run, Timing, Workload
from attnspan_lab.bench.results import Evaluation, MonitorRecord, PhaseShares, Results, TrainingCell
from attnspan_lab.bench.statistics import Samples, paired

CEILINGS = Ceilings(
    {"fma_f32": 2.06e11, "dot_bf16": 4.1e11, "matmul_bf16": 2.9e11, "fma_f16": 2.02e11},
    1.84e10,
    {"fma_f32": "512-bit FMA, 2 threads", "dot_bf16": "vdpbf16ps", "read_bandwidth": "1 GiB, 2 threads"},
)
PEAKS = {"float32": 2.06e11, "bfloat16": 4.1e11, "float16": 2.02e11}
# Seconds of a peer over ours, on the whole; a peer that masks densely pays for every pair.
PEERS = {"sdpa-flash": 1.45, "sdpa-dense-mask": 3.1, "sdpa-per-document": 2.2, "flex": 1.9, "jax": 4.2}
ENVIRONMENT = {
    "cpu": "Intel Xeon (a made-up one)",
    "cores": 2,
    "isa": "avx512bf16",
    "memory_bytes": 16 * 2**30,
    "load_average": [0.123456789, 0.5],
    "versions": {"attnspan": "0.1.0", "torch": "2.13.0+cpu", "jax": "0.11.0", "tokamax": None},
    "flags": ["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "amx_tile"],
}


def workloads(dtypes: Iterable[str] = ("float32", "bfloat16")) -> list[Workload]:
    """A few of each family; some vary the length, some the head dim, some do neither."""

    found: list[Workload] = []
    for dtype in dtypes:
        found += _of_dtype(dtype)
    return found


def _of_dtype(dtype: str) -> list[Workload]:
    def work(name: str, mask: str, lengths: tuple[int, int], dim: int, heads: tuple[int, int]) -> Workload:
        return Workload(name, name.split("-")[0], 1, *heads, *lengths, dim, dim, dtype, mask)

    found = []
    for mask, dim in product(("full", "causal"), (64, 128)):
        found += [
            work(f"grid-{mask}-d{dim}-s{length}", mask, (length, length), dim, (8, 8))
            for length in (128, 1024, 4096, 16384)
        ]
    for name, mask in (("32", "causal & packed(32)"), ("corpus", "causal & corpus(0)")):
        found.append(work(f"documents-{name}", mask, (8192, 8192), 64, (8, 8)))
    for length in (8192, 65536):
        found.append(work(f"decode-1-{length}", "causal", (1, length), 128, (32, 8)))
    for length in (2048, 65536):
        found.append(work(f"long-{length}", "window(1023)", (length, length), 64, (2, 2)))
    return found


def sample_results(
    problems: Iterable[Workload] | None = None, modes: Iterable[str] = ("forward", "forward+backward")
) -> Results:
    """Everything there can be, from a fixed seed."""
    draw = random.Random(0)
    modes = tuple(modes)
    cells = [_cell(work, mode, draw) for work in (problems or workloads()) for mode in modes]
    return Results(
        environment=ENVIRONMENT,
        ceilings=CEILINGS,
        cells=tuple(cells),
        training=training(),
        monitor=monitor(),
        evaluations=(Evaluation(0, 5.6), Evaluation(120, 2.9)),
    )


def pairs_of(work: Workload) -> int:
    """Visible pairs, roughly."""
    dense = work.batch * work.q_heads * work.q_len * work.k_len
    if "packed" in work.mask or "corpus" in work.mask:
        return dense // 64
    if "window" in work.mask:
        return min(dense, work.batch * work.q_heads * work.q_len * 1024)
    return dense // 2 if "causal" in work.mask and work.q_len > 16 else dense


def _cell(work: Workload, mode: str, draw: random.Random) -> Cell:
    pairs = pairs_of(work)
    flops = 4.0 * pairs * work.head_dim * (1 if mode == "forward" else 3.5)
    size = 4 if work.dtype == "float32" else 2
    moved = float(
        size * work.batch * work.head_dim * (2 * work.q_heads * work.q_len + 2 * work.kv_heads * work.k_len)
    )
    intensity = flops / moved
    share = 0.88 * work.k_len / (work.k_len + 220) * draw.uniform(0.93, 1.0)
    rate = min(PEAKS[work.dtype] * share, 0.9 * intensity * CEILINGS.read_bandwidth)
    seconds = flops / rate + 4e-6
    ours = _samples(seconds, draw)
    runs = [
        Run(
            "attnspan",
            compile_seconds=2e-3,
            execute=Timing(ours),
            dispatch=Timing(_samples(6e-6, draw)),
            peak_memory=int(moved * 0.2) + 65536,
            utilisation=0.97,
            note="cpu, avx512bf16",
        )
    ]
    runs += [_peer(peer, factor, work, pairs, ours, draw) for peer, factor in PEERS.items()]
    runs.append(Run("tokamax", reason="it is not installed: pip install tokamax"))
    return Cell(work, mode, pairs, flops, moved, tuple(runs))


def _samples(seconds: float, draw: random.Random, noise: float = 0.02) -> tuple[float, ...]:
    return tuple(seconds * draw.lognormvariate(0, noise) for _ in range(15))


def _peer(
    peer: str, factor: float, work: Workload, pairs: int, ours: tuple[float, ...], draw: random.Random
) -> Run:
    documents = "packed" in work.mask or "corpus" in work.mask
    if peer == "sdpa-per-document" and not documents:
        return Run(peer, reason="the mask has no documents")
    if peer == "sdpa-flash" and work.mask not in ("full", "causal"):
        return Run(peer, reason="its kernel knows no mask but the causal one")
    dense = work.batch * work.q_heads * work.q_len * work.k_len
    if peer == "sdpa-dense-mask" and work.k_len > 16384 and work.q_len > 16:
        return Run(peer, reason=f"a dense mask of {work.q_len} x {work.k_len} needs {dense / 2**30:.0f} GiB")
    if peer == "sdpa-dense-mask":
        factor *= dense / pairs
    factor *= draw.lognormvariate(0, 0.12) * (0.66 if work.k_len == 128 else 1)
    noisy = draw.random() < 0.08
    theirs = tuple(second * factor * draw.lognormvariate(0, 0.15 if noisy else 0.02) for second in ours)
    return Run(
        peer,
        trace_seconds=0.4 if peer == "jax" else None,
        compile_seconds=6.5 if peer in ("flex", "jax") else 1e-3,
        execute=Timing(theirs),
        dispatch=Timing(_samples(9e-6, draw)),
        peak_memory=dense if peer == "sdpa-dense-mask" else int(dense / work.k_len * 400) + 2**17,
        utilisation=0.9,
        ratio=paired(ours, theirs),
        noisy=noisy,
        error=3e-7 if work.dtype == "float32" else 2e-3,
    )


def training() -> tuple[TrainingCell, ...]:
    """The reference job with three attentions, one of which could not run."""
    draw = random.Random(1)
    ours, theirs = _samples(0.41, draw), _samples(0.73, draw)
    job = "8,192 tokens a step, bfloat16"
    return (
        TrainingCell(
            "attnspan",
            None,
            Timing(ours),
            Samples(tuple(8192 / second for second in ours)),
            1_400 * 2**20,
            note=job,
        ),
        TrainingCell(
            "sdpa-dense-mask",
            None,
            Timing(theirs),
            _tokens(theirs),
            2_900 * 2**20,
            paired(ours, theirs),
            noisy=True,
            note=job,
        ),
        TrainingCell("sdpa-per-document", reason="the lengths of documents are not known to the compiler"),
    )


def _tokens(seconds: tuple[float, ...]) -> Samples:
    return Samples(tuple(8192 / second for second in seconds))


def monitor(steps: int = 120) -> tuple[MonitorRecord, ...]:
    """A training: the first step compiles, a page of data is slow now and then."""
    draw = random.Random(2)
    records = []
    for step in range(1, steps + 1):
        data = 0.02 + (0.15 if step % 25 == 0 else 0.0) + draw.random() * 0.01
        compiled = 6.0 if step == 1 else 0.0
        host = 0.04 + (0.6 if step == 1 else 0.0)
        rest = 1 - data - host
        seconds = 0.41 * draw.lognormvariate(0, 0.03) + compiled
        shares = PhaseShares(data, host, 0.33 * rest, 0.55 * rest, 0.12 * rest)
        records.append(
            MonitorRecord(
                step,
                seconds,
                8192,
                shares,
                attention_seconds=0.11 * draw.lognormvariate(0, 0.02),
                attention_flops=2.4e10,
                ceiling=4.1e11,
                compile_seconds=compiled,
                memory=int((1.2 + 0.2 * min(step, 10) / 10) * 2**30),
                utilisation=0.92 + draw.random() * 0.05,
                loss=2.5 + 3 / step**0.5 + draw.gauss(0, 0.2),
            )
        )
    return tuple(records)
