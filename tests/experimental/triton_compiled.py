"""Compile each kernel as its launches would, for GPUs that this machine lacks, and say what came of it.

    python tests/experimental/triton_compiled.py '[[90, "bfloat16", 128, "dense", 0]]'

A process of its own: in one that interprets Triton nothing can be compiled.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from attnspan.call.options import ALIBI, DENSE, DISTANCE, Options
from attnspan.experimental.triton import _launch
from attnspan.kernels import _offsets

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32", "int64": "i64"}
OPTIONS = {"num_warps", "num_stages"}


class Recorder:
    """In the place of a kernel: writes down its launches."""

    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*positional: Any, **named: Any) -> None:
            given = dict(zip(self.kernel.arg_names, positional, strict=False)) | named
            self.launches.append((self.kernel, given))

        return launch


def launches_of(
    options: Options, dtype: torch.dtype, dim: int, v_dim: int, group: int, parts: int
) -> list[Any]:
    """The launches of a forward and a backward pass."""
    launches: list[Any] = []
    kept = {name: x for name, x in vars(_launch).items() if name.endswith("_kernel")}
    for name, kernel in kept.items():
        setattr(_launch, name, Recorder(kernel, launches))
    q = torch.empty(2, 2 * group, 512, dim, dtype=dtype)
    k, v = torch.empty(2, 2, 512, dim, dtype=dtype), torch.empty(2, 2, 512, v_dim, dtype=dtype)
    out, lse = torch.empty(2, 2 * group, 512, v_dim, dtype=dtype), torch.empty(2, 2 * group, 512)
    bounds = torch.empty(1, 1, 512, 2, 2, dtype=torch.int32)
    _launch.forward(q, k, v, bounds, out, lse, scale=1.0, options=options, parts=parts)
    dbias = None if options.bias is None else torch.empty(options.bias.shape)
    dsinks = None if options.sinks is None else torch.empty(options.sinks.shape)
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    call = {"scale": 1.0, "options": options, "dbias": dbias, "dsinks": dsinks}
    _launch.backward(out, None, q, k, v, out, lse, bounds, *gradients, **call)
    for name, kernel in kept.items():
        setattr(_launch, name, kernel)
    return launches


@cache
def launches_of_offsets() -> list[Any]:
    """Those of checked offsets, for a call of 512 tokens in bfloat16."""
    launches: list[Any] = []
    for name in ("check_kernel", "clear_kernel", "lse_kernel"):
        setattr(_offsets, name, Recorder(getattr(_offsets, name), launches))
    ends = torch.empty(9, dtype=torch.int64)
    found = _offsets.Offsets.checked(ends, ends, 512, 512)
    found.clear_queries(torch.empty(1, 8, 512, 64, dtype=torch.bfloat16))
    found.finish_lse(torch.empty(1, 8, 512))
    return launches


def binary(kernel: Any, given: dict[str, Any], capability: int) -> Any:
    """What Triton makes of a launch."""
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        x = given[parameter.name]
        if parameter.is_constexpr or x is None:
            signature[parameter.name], constants[(at,)] = "constexpr", x
        elif isinstance(x, TensorDescriptor):
            kind = TYPES[str(x.base.dtype)[6:]]
            signature[parameter.name] = f"tensordesc<{kind}{[*x.block_shape]}>"
        elif isinstance(x, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[str(x.dtype)[6:]]
            attributes[(at,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(x, float) else "i32"
            if isinstance(x, int) and x % 16 == 0:
                attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {name: given[name] for name in OPTIONS & set(given)}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def tool(name: str, cubin: bytes, *options: str) -> str:
    """What a tool of CUDA's prints about a program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / name), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compiled(kernel: Any, given: dict[str, Any], capability: int) -> dict[str, Any]:
    """Registers, spills, shared memory and matrix instructions of a launch."""
    done = binary(kernel, given, capability)
    usage = tool("cuobjdump", done.asm["cubin"], "--dump-resource-usage")
    found = {name: int(x) for name, x in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = done.asm["ptx"]
    matrix = sorted({x for x in ("mma.sync", "wgmma", "tcgen05.mma") if x in ptx})
    by_engine = "cp.async.bulk.tensor" in ptx
    return {
        "kernel": kernel.__name__,
        "shared": done.metadata.shared,
        "matrix": matrix,
        "by_engine": by_engine,
        **found,
    }


def options_named(name: str, dtype: torch.dtype) -> Options:
    """For a call of 2 batch rows, 8 heads and 512 tokens."""
    seeds, index = torch.empty(2, 8, dtype=torch.int64), torch.empty(1, 512, dtype=torch.int32)
    dropout: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": seeds}
    several = {"softcap": 5.0, "sinks": torch.empty(8), "q_index": index, "k_index": index}
    return {
        "none": Options(),
        "softcap": Options(softcap=5.0, sinks=torch.empty(8)),
        "alibi": Options(bias=torch.empty(1, 8), bias_kind=ALIBI),
        "dense": Options(bias=torch.empty(2, 8, 512, 512, dtype=dtype), bias_kind=DENSE),
        "dropout": Options(**dropout),
        "everything": Options(bias=torch.empty(8, 257), bias_kind=DISTANCE, **dropout, **several),
    }[name]


_launch._has_waves = lambda *_: True  # type: ignore[assignment]  # blocks start in an order of their own


config_of = _launch.config_of


def main(calls: str) -> None:
    """For each call a capability, dtype, head dim, option, and whether there are descriptors."""
    found = []
    for capability, dtype, dim, options, descriptors in json.loads(calls):
        _launch.config_of = lambda *given, at=capability, by_engine=descriptors: replace(
            config_of(*given[:4], at, *given[5:]), descriptors=by_engine
        )
        kind = getattr(torch, dtype)
        launches = launches_of(options_named(options, kind), kind, dim, dim, 4, 1)
        found.append([compiled(*each, capability) for each in (*launches, *launches_of_offsets())])
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
