"""Time per visible pair of long calls with two builds of attnspan, which take turns.

    python benchmarks/fresh_memory.py old/bin/python new/bin/python 9 samples.json

Each Python has one build installed. The output has medians in nanoseconds per visible pair, and page faults
per call.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

TOKENS = 4_096, 65_536, 262_144
WORKER = """
import json, resource, sys, time
import numpy as np, torch, attnspan
from attnspan.torch import attention

def mask_of(name, tokens):
    if name == "window":
        seen = np.minimum(np.arange(tokens) + 1, 1024).sum()
        return attnspan.window(1023) & attnspan.causal(), seen
    draw, lengths = np.random.default_rng(0), []
    while sum(lengths) < tokens:
        lengths.append(min(int(draw.integers(100, 1500)), tokens - sum(lengths)))
    mask = attnspan.causal() & attnspan.documents(torch.tensor(np.cumsum([0, *lengths])))
    return mask, sum(n * (n + 1) // 2 for n in lengths)

def cell(name, tokens, backward):
    mask, pairs = mask_of(name, tokens)
    q, k, v = (torch.randn(1, 2, tokens, 64, requires_grad=backward) for _ in range(3))
    dout = torch.randn(1, 2, tokens, 64)
    def call():
        out = attention(q, k, v, mask=mask)
        if backward:
            torch.autograd.grad(out, (q, k, v), dout)
    return call, 2 * int(pairs)

torch.set_num_threads(2)
asked = None
for line in sys.stdin:
    if line != asked:
        call, pairs = cell(*json.loads(line))
        asked = line
        call()
    call()
    count = max(1, 65536 // json.loads(line)[1])
    faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    for _ in range(count):
        call()
    seconds = (time.perf_counter() - start) / count
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    print(json.dumps([seconds / pairs * 1e9, faults / count]), flush=True)
"""


def main(old: str, new: str, rounds: str, path: str) -> None:
    workers = {
        name: subprocess.Popen(
            [python, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name, python in (("before", old), ("after", new))
    }
    cells = []
    for mask in ("window", "documents"):
        for backward in (False, True):
            for tokens in TOKENS:
                samples: dict[str, list[list[float]]] = {name: [] for name in workers}
                for i in range(int(rounds)):
                    for name in sorted(workers, reverse=i % 2 == 0):
                        worker = workers[name]
                        worker.stdin.write(json.dumps([mask, tokens, backward]) + "\n")
                        worker.stdin.flush()
                        samples[name].append(json.loads(worker.stdout.readline()))
                cells.append({"mask": mask, "backward": backward, "tokens": tokens, **samples})
                times = {name: statistics.median(x for x, _ in samples[name]) for name in workers}
                faults = {name: round(samples[name][-1][1]) for name in workers}
                print(mask, "forward+backward" if backward else "forward", tokens, times, faults, flush=True)
    Path(path).write_text(json.dumps(cells))


if __name__ == "__main__":
    main(*sys.argv[1:])
