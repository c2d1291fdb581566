"""FlexAttention's forward kernel as inductor generates it for an H100, without an H100."""

import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._inductor import async_compile, scheduler
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.runtime import triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: Properties of an H100 that inductor reads.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    total_memory=80 << 30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
)
ANSWERS: list[tuple[ModuleType, str, Any]] = [
    (torch.cuda, "is_available", True),
    (torch.cuda, "is_initialized", True),
    (torch.cuda, "device_count", 1),
    (torch.cuda, "current_device", 0),
    (torch.cuda, "get_device_properties", H100),
    (torch.cuda, "_get_device_properties", H100),
    (torch.cuda, "get_device_capability", (9, 0)),
    (torch.cuda, "_exchange_device", 0),
    (torch.cuda, "_maybe_exchange_device", 0),
    # There is no random number generator whose state could be saved.
    (torch.cuda, "get_rng_state", torch.zeros(16)),
    (torch.cuda, "set_rng_state", None),
    # inductor traces its patterns with tensors of the device.
    (joint_graph, "lazy_init", None),
    (post_grad, "lazy_init", None),
    (scheduler, "has_triton", True),
]


class Written(Exception):
    """Raised when a kernel's source is written, to stop the compilation."""


def _stop(_: Any, name: str, source: str, *__: Any, **___: Any) -> None:
    raise Written(name, source)


@contextmanager
def _as_if_there() -> Iterator[None]:
    limits = {"max_shared_mem": H100.shared_memory_per_block_optin}
    utils = SimpleNamespace(get_device_properties=lambda _: limits)
    target = GPUTarget("cuda", 90, 32)
    # Triton's own driver would look for a GPU driver.
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target, utils=utils))
    with ExitStack() as stack:
        for module, name, answer in ANSWERS:
            patch = mock.patch.object(module, name, mock.Mock(return_value=answer), create=True)
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(async_compile.AsyncCompile, "triton", _stop))
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True, compile_threads=1))
        yield


def _causal(length: int) -> BlockMask:
    blocks = length // 128
    count = torch.empty(1, 1, blocks, dtype=torch.int32, device="cuda")
    numbers = torch.empty(1, 1, blocks, blocks, dtype=torch.int32, device="cuda")
    return BlockMask.from_kv_blocks(
        count,
        numbers,
        count.clone(),
        numbers.clone(),
        mask_mod=lambda _, __, i, j: i >= j,
        seq_lengths=(length, length),
        compute_q_blocks=False,
    )


def _write(graph: Any, inputs: Any) -> Any:
    with _as_if_there():
        return compile_fx(graph, inputs)


def _source(dim: int, heads: int, kv_heads: int, length: int) -> str:
    attend = partial(flex_attention, enable_gqa=True, return_lse=True)
    with FakeTensorMode():
        q = torch.empty(1, heads, length, dim, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(1, kv_heads, length, dim, device="cuda", dtype=torch.bfloat16)
        try:
            torch.compile(attend, fullgraph=True, backend=_write)(q, k, k, block_mask=_causal(length))
        except Exception as error:
            found: BaseException | None = error
            while found is not None and not isinstance(found, Written):
                found = found.__cause__ or found.__context__
            if found is None:
                raise
            return str(found.args[1])
    raise RuntimeError("FlexAttention wrote no kernel")


def _loaded(source: str) -> tuple[Any, dict[str, Any]]:
    """Load the kernel, and the arguments of its decorator. Triton reads the file while it compiles."""
    given: dict[str, Any] = {}

    def template(**options: Any) -> Any:
        given.update(options)
        return lambda kernel: kernel

    path = Path(tempfile.mkdtemp()) / "flex_kernel.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("flex_kernel", path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = sys.modules["flex_kernel"] = importlib.util.module_from_spec(spec)
    with mock.patch.object(triton_heuristics, "template", template):
        spec.loader.exec_module(module)
    kernels = [x for x in vars(module).values() if isinstance(x, triton.JITFunction)]
    return next(x for x in kernels if x.arg_names[0] == "arg_Q"), given


def compiled(dim: int, capability: int) -> tuple[Any, dict[str, int]]:
    """Compile the kernel with Triton for eight query heads and two key heads.

    Return it with its BLOCK_M, BLOCK_N and num_warps.
    """
    source = _source(dim, 8, 2, 4096)
    kernel, given = _loaded(source)
    meta = given["triton_meta"]
    code = ASTSource(kernel, meta["signature"], meta["constants"], dict(meta["configs"][0]))
    options = {name: given[name] for name in ("num_warps", "num_stages")}
    done = triton.compile(code, target=GPUTarget("cuda", capability, 32), options=options)
    blocks = dict(re.findall(r"(BLOCK_[MN]) : tl.constexpr = (\d+)", source))
    return done, {name: int(x) for name, x in blocks.items()} | {"num_warps": given["num_warps"]}
