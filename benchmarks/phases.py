"""CPU kernel time by phase, with a lower bound for each phase: python benchmarks/phases.py WHEEL

The benchmark needs Linux's `perf`, and a build that keeps the names of functions:

    pip wheel . --no-deps -w build/symbols -C build-dir=build/symbols \\
        -C cmake.define.ATTNSPAN_SYMBOLS=ON -C install.strip=false

It runs one thread and eight heads. The results are cycles per visible score: samples of `perf record` times
the clock at which `peak` multiplies and adds. The bound counts instructions: products at the measured peak of
the level, and softmax at 11 micro-operations per vector of scores, two per cycle. Whether a product adds to
its result distinguishes the products. In float32's dP, whose sum over depth is split, all parts but the first
add.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from zipfile import ZipFile

HEADS, SECONDS = 8, 4.0
WIDTH = {"portable": 4, "avx2": 8, "avx512": 16, "avx512bf16": 16}  # floats per vector
#: Phase -> pattern of function names. The first match counts.
PHASES = {
    "products: scores, dP": r"(product_of|some_rows|few_rows)<.*false, (true|false)>",
    "products: values, dV, dK, dQ": r"product_of|some_rows|few_rows",
    "softmax, dS": r"weights_of_row|softmax_strip|::weights<|exponentials|raise_maxima|add_strip",
    "norms": r"largest_norm|measure|squares|finite<",
    "packing": r"Packer|pack_|transpose|find_delta|diagonal",
    "ends of rows": r"query_block|end_of_row|write_|finish|unit\(|::unit",
    "which scores are seen": r"next_job|look|seen_|add_tiles|attend|Columns|Each|hide|hull|Sequences|Plan",
    "clearing, copies": r"memset|memmove|memcpy",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--masks", nargs="+", default=["full-2048", "causal-2048", "documents-256-8192"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(library: str, case: str) -> None:
    """Call the kernel for some seconds, and print the number of calls, seconds, scores and the clock."""
    import torch

    from attnspan import causal, documents, full
    from attnspan.kernels import cpu

    spec = spec_from_file_location("attnspan._core", library)
    assert spec is not None
    assert spec.loader is not None
    cpu.core = module_from_spec(spec)
    spec.loader.exec_module(cpu.core)
    name, direction, dim, kind = case.split()
    mask, *numbers = kind.split("-")
    length, dtype = int(numbers[-1]), getattr(torch, name)
    made = full() if mask == "full" else causal()
    if mask == "documents":
        made = causal() & documents(list(range(0, length + 1, int(numbers[0]))))
    shape = 1, length, HEADS, int(dim)
    q, k, v, dout = (torch.randn(shape).to(dtype).transpose(1, 2) for _ in range(4))
    out, lse = torch.empty_like(q), torch.empty(1, HEADS, length)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    bounds = made.spans(length, length, like=q).lowered.bounds.contiguous()
    given = {"scale": int(dim) ** -0.5, "num_threads": 1}
    cpu.forward(q, k, v, bounds, out, lse, **given)
    clock = cpu.peak("fma_f32", num_threads=1, seconds=0.3) / (4 * WIDTH[cpu.isa()])
    print("ready", flush=True)
    sys.stdin.readline()
    calls, start = 0, time.process_time()
    while time.process_time() - start < SECONDS:
        if direction == "forward":
            cpu.forward(q, k, v, bounds, out, lse, **given)
        else:
            cpu.backward(dout, None, q, k, v, out, lse, bounds, *gradients, **given)
        calls += 1
    scores = int((bounds[..., 1] - bounds[..., 0]).sum()) * HEADS * calls
    print(time.process_time() - start, scores, clock, cpu.isa(), flush=True)
    os._exit(0)  # do not measure Python's exit


def measure(library: str, case: str, folder: str) -> None:
    """Print the table of a case."""
    data = f"{folder}/perf.data"
    command = [sys.executable, __file__, library, "--work", case]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        record = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "2000", "-p", str(child.pid), "-o", data]
        with subprocess.Popen(record) as recorder:
            time.sleep(0.5)
            print(file=child.stdin, flush=True)
            seconds, scores, clock, isa = child.stdout.read().split()
            recorder.wait()
    report = ["perf", "report", "-i", data, "--stdio", "--no-children", "-F", "overhead,sym"]
    report += ["--percent-limit", "0"]
    lines = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    shares: Counter[str] = Counter()
    for share, symbol in re.findall(r"^\s*([\d.]+)%\s+\[.\]\s+(.*)$", lines, re.MULTILINE):
        phase = next((phase for phase, names in PHASES.items() if re.search(names, symbol)), "the rest")
        shares[phase] += float(share)
    name, direction, dim, _ = case.split()
    cycles = float(seconds) * float(clock) / int(scores)
    fast = isa == "avx512bf16" and name == "bfloat16"
    product = 2 * int(dim) / (4 * WIDTH[isa] * (2 if fast else 1))
    bounds = {
        "products: scores, dP": product * (1 if direction == "forward" else 2),
        "products: values, dV, dK, dQ": product * (1 if direction == "forward" else 3),
        "softmax, dS": 11 / 2 / WIDTH[isa],
    }
    whole = f"{cycles:.2f} cycles a score at {float(clock) / 1e9:.2f} GHz, bound {sum(bounds.values()):.2f}"
    print(f"\n{case}, {isa}: {whole}")
    for phase, share in shares.most_common():
        bound = f"{bounds[phase]:8.2f}" if phase in bounds else " " * 8
        print(f"  {phase:32}{share:6.1f} %{cycles * share / 100:8.2f}{bound}")
    sys.stdout.flush()


def main() -> None:
    given = parse()
    if given.work:
        return work(str(given.wheel), given.work)
    with tempfile.TemporaryDirectory() as folder:
        with ZipFile(given.wheel) as wheel:
            name = next(x for x in wheel.namelist() if "_core" in x)
            library = wheel.extract(name, folder)
        for dtype in given.dtypes:
            for direction in ("forward", "backward"):
                for dim in given.head_dims:
                    for mask in given.masks:
                        measure(library, f"{dtype} {direction} {dim} {mask}", folder)
    return None


if __name__ == "__main__":
    main()
