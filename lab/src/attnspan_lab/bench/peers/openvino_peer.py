"""OpenVINO's attention on CPU: one operator, compiled by the CPU plugin, in the job's dtype."""

from __future__ import annotations

import os
import sys
import time
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attnspan_lab.bench.devices import device_named
from attnspan_lab.bench.peers.job import Job, Ready, enough_memory, held_below

__all__ = ["OpenVino"]

# dtype -> the plugin's names of the precision and of the element type.
_PRECISIONS = {"float32": ("FP32", "f32"), "bfloat16": ("BF16", "bf16"), "float16": ("FP16", "f16")}
# The first variable limits the plugin's own kernels, the second one its oneDNN.
_LEVELS = ("OV_CPU_MAX_ISA", "ONEDNN_MAX_CPU_ISA")


class OpenVino:
    """`ScaledDotProductAttention` of opset 13: one stream, lowest latency, one request for all calls."""

    name = "openvino"

    def refuses(self, job: Job) -> str | None:
        if job.device != "cpu":
            return f"it is compared on CPU, not on {job.device}"
        if find_spec("openvino") is None:
            return "openvino is not installed"
        if job.backward:
            return "it has no backward pass"
        if held := held_below(holders=_LEVELS):
            return held
        if len({os.environ.get(name) for name in _LEVELS}) > 1:
            return f"{' and '.join(_LEVELS)} differ: set both to the same level"
        # The plugin would silently compute in another precision.
        found = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if _PRECISIONS[job.workload.dtype][0] not in found:
            known = [dtype for dtype, (name, _) in _PRECISIONS.items() if name in found]
            return f"its CPU plugin computes in {' and '.join(known)} here, not in {job.workload.dtype}"
        # A causal flag becomes an array as well, with two float32 copies during compilation.
        pairs = 0 if job.is_full else job.folded_pairs
        return enough_memory(job, 9.0 * pairs, "the array of its mask")

    def prepare(self, job: Job) -> Ready:
        ov = _module("openvino")
        w, kind = job.workload, getattr(ov.Type, _PRECISIONS[job.workload.dtype][1])
        # OpenVINO's own layout. Grouped heads become more rows of a key head, which copies no keys.
        rows = (w.batch, w.kv_heads, w.q_heads // w.kv_heads * w.q_len)
        q, k, v = (x.detach().contiguous() for x in (job.q, job.k, job.v))
        out = torch.empty(w.batch, w.q_heads, w.q_len, w.v_dim, dtype=q.dtype)
        arrays = (q.view(*rows, w.head_dim), k, v, out.view(*rows, w.v_dim))
        start = time.perf_counter()
        compiled = _compiled(ov, kind, [list(x.shape) for x in arrays[:3]], job)
        done = time.perf_counter()
        request = compiled.create_infer_request()
        *inputs, result = (_shared(ov, x, kind) for x in arrays)
        for index, tensor in enumerate(inputs):
            request.set_input_tensor(index, tensor)
        request.set_output_tensor(0, result)

        def call(_kept: object = arrays) -> Tensor:
            # Write results into `out`: by default they would be copied.
            request.infer(share_outputs=True)
            return out

        return Ready(call, device_named("cpu"), compile_seconds=done - start, note=_note(compiled, job))


def _module(name: str) -> Any:
    # Importing openvino starts a telemetry process, unless this package is missing.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return import_module(name)


@cache
def _core() -> Any:
    return _module("openvino").Core()


def _compiled(ov: Any, kind: Any, shapes: list[list[int]], job: Job) -> Any:
    ops = _module("openvino.opset13")
    inputs = [ops.parameter(shape, kind) for shape in shapes]
    flag = job.needs_causal_flag and not job.grouped
    mask = [] if flag or job.is_full else [ops.constant(job.folded_mask().numpy())]
    attended = ops.scaled_dot_product_attention(*inputs, *mask, causal=flag)
    options = {
        "INFERENCE_NUM_THREADS": job.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": kind,
        # Pinned threads would compete with torch's threads on the same cores.
        "ENABLE_CPU_PINNING": False,
    }
    return _core().compile_model(ov.Model([attended], inputs, "attention"), "CPU", options)


def _shared(ov: Any, x: Tensor, kind: Any) -> Any:
    """Make an OpenVINO tensor over the memory of a contiguous tensor. The caller keeps that tensor alive."""
    # NumPy has no bfloat16, so pass the bits as int16.
    array = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return ov.Tensor(array, list(x.shape), kind) if x.dtype == torch.bfloat16 else ov.Tensor(array, True)


def _note(compiled: Any, job: Job) -> str:
    """Name the kernels that the plugin chose, and its number of threads if it differs from the job's."""
    found = [
        node.get_rt_info()["primitiveType"].astype(str) for node in compiled.get_runtime_model().get_ops()
    ]
    kernels = dict.fromkeys(kernel for kernel in found if kernel.startswith("jit"))
    threads = compiled.get_property("INFERENCE_NUM_THREADS")
    return ", ".join([*kernels, *([] if threads == job.threads else [f"{threads} threads"])])
