"""Machine code of the Triton kernels for an H100, analysed without a GPU: python benchmarks/gpu_code.py

bfloat16, head dims 64 and 128, four query heads per key head. For each kernel, the benchmark prints
registers, spilled bytes, shared memory, and the instructions of a warp in its shortest loop with matrix
products, for tiles without a mask. Then it prints the cycles of a multiprocessor for the tile, by unit:
products at the rate of their instruction on an H100, exponentials at 16 lanes per cycle, and one instruction
per cycle for each of four schedulers. There are two predictions: products followed by the longer of the other
units, as in a single block, and all units at the same time. Other warp groups and blocks on the
multiprocessor bring a kernel closer to the second prediction.
"""

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "experimental"))

import torch
from triton_compiled import binary, launches_of, tool

from attnspan.call.options import Options
from attnspan.experimental.triton import _launch

#: Of an H100: capability, multiprocessors, clock, and FLOP/s by instruction. HGMMA: measured, a product of
#: 8,192^3. HMMA: 62.9 % of the peak, 989e12, which is the mean that arXiv 2402.13499 measured.
CAPABILITY, PROCESSORS, CLOCK = 90, 132, 1.755e9
RATES = {"HGMMA": 798e12, "HMMA": 0.629 * 989e12}
#: Registers and bytes of shared memory of a multiprocessor. Each block reserves one more kibibyte.
REGISTERS, SHARED, RESERVED = 65_536, 228 << 10, 1 << 10
KERNELS = {
    "forward_kernel": 2,
    "query_gradients_kernel": 3,
    "key_gradients_kernel": 4,
}  # number of products per tile
CLASSES = {
    "matrix": r"HGMMA|HMMA|UTCHMMA",
    "exp2": r"MUFU",
    "float": r"FADD|FMUL|FFMA|FMNMX|FSETP|FSEL|FMNMX3",
    "convert": r"F2F",
    "shared": r"LDS|STS|LDSM|STSM|ATOMS",
    "global": r"LDG(?!DEPBAR)|UTMA|STG|REDG?\b|ATOMG?\b",
    "shuffle": r"SHFL",
    "wait": r"BAR|WARPSYNC|DEPBAR|SYNCS|WARPGROUP|LDGDEPBAR",
}


def instructions(sass: str) -> list[tuple[str, str]]:
    """Labels and instructions in order: ("label", name) or (operation, operands)."""
    found = []
    for line in sass.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            found.append(("label", label[1]))
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line):
            found.append((code[1], code[2]))
    return found


def loops(code: list[tuple[str, str]]) -> list[list[str]]:
    """List the operations of each loop."""
    at = {name: i for i, (kind, name) in enumerate(code) if kind == "label"}
    ends = [
        (at[target[0]], i)
        for i, (kind, operands) in enumerate(code)
        if kind.startswith("BRA")
        and (target := re.findall(r"\.L_x_\d+", operands))
        and at.get(target[0], i) < i
    ]
    return [[kind for kind, _ in code[a:b] if kind != "label"] for a, b in ends]


def counted(operations: list[str]) -> Counter[str]:
    def kind(operation: str) -> str:
        return next((name for name, x in CLASSES.items() if re.match(x, operation)), "integer, moves")

    return Counter(kind(x) for x in operations)


def blocks_at_once(registers: int, shared: int, warps: int) -> int:
    """Compute the number of blocks per multiprocessor. Registers are allocated in units of eight."""
    room = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return max(1, min(room, SHARED // (shared + RESERVED)))


def row(label: str, cubin: bytes, blocks: dict[str, Any], flops_of_pair: int, **more: Any) -> str:
    """Compute the cost of a kernel's loop. `more`: `name` if the program has several, and `shared` memory."""
    name = more.get("name", "")
    usage = tool("cuobjdump", cubin, "--dump-resource-usage").partition(name)[2] if name else ""
    usage = usage or tool("cuobjdump", cubin, "--dump-resource-usage")
    size = {kind: int(x) for kind, x in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)[:3]}
    sass = tool("nvdisasm", cubin, "-c")
    if name:
        sass = sass.partition(f".section\t.text.{name},")[2].partition(".section\t")[0]
    found = [counted(x) for x in loops(instructions(sass))]
    loop = min((x for x in found if x["matrix"] and x["exp2"]), key=lambda x: x.total())
    m, n, warps = blocks["BLOCK_M"], blocks["BLOCK_N"], blocks["num_warps"]
    flops = flops_of_pair * m * n
    rate = RATES["HGMMA" if "HGMMA" in sass else "HMMA"]
    products = flops / (rate / PROCESSORS / CLOCK)
    exponentials, issued = loop["exp2"] * warps * 32 / 16, loop.total() * warps / 4
    cycles = products + max(exponentials, issued), max(products, exponentials, issued)
    rates = " to ".join(f"{flops / x * PROCESSORS * CLOCK / 1e12:.0f}" for x in cycles)
    cells = [
        label,
        f"{m} x {n}, {warps} warps",
        f"{size['REG']} / {size['STACK'] + size['LOCAL']} B",
        f"{more['shared'] / 1024:.0f} KiB" if "shared" in more else "",
        str(blocks_at_once(size["REG"], more.get("shared", 0), warps)),
        ", ".join(f"{name} {loop[name]}" for name in (*CLASSES, "integer, moves") if loop[name]),
        f"{products:.0f} / {exponentials:.0f} / {issued:.0f}",
        rates,
    ]
    return f"| {' | '.join(cells)} |"


def own(dim: int) -> None:
    for kernel, given in launches_of(Options(), torch.bfloat16, dim, dim, 4, 1):
        if kernel.__name__ in KERNELS:
            done = binary(kernel, given, CAPABILITY)
            label = f"{kernel.__name__.removesuffix('_kernel')}, D={dim}"
            flops = KERNELS[kernel.__name__] * 2 * dim
            print(row(label, done.asm["cubin"], given, flops, shared=done.metadata.shared), flush=True)


def peers(dim: int) -> None:
    """Yield FlexAttention as inductor generates it, and FlashAttention 2 from torch's CUDA build."""
    import _flash_code
    import _flex_code

    done, blocks = _flex_code.compiled(dim, CAPABILITY)
    label = f"FlexAttention, forward, D={dim}"
    print(row(label, done.asm["cubin"], blocks, 4 * dim, shared=done.metadata.shared), flush=True)
    for kernel, products in (("forward_kernel", 2), ("backward_kernel", 5)):
        cubin, name, blocks = _flash_code.binary(kernel, dim)
        label = f"FlashAttention 2, {kernel.removesuffix('_kernel')}, D={dim}"
        print(row(label, cubin, blocks, products * 2 * dim, name=name), flush=True)


def main() -> None:
    columns = ["kernel", "tile", "registers / spilled", "shared", "blocks at once", "a warp's loop"]
    columns += ["cycles: products / exp2 / issue", "TFLOP/s"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    of = _launch.config_of
    _launch.config_of = lambda *given: of(*given[:4], CAPABILITY, *given[5:])
    for dim in (64, 128):
        own(dim)
    if torch.version.cuda is not None:
        for dim in (64, 128):
            peers(dim)


if __name__ == "__main__":
    main()
