"""ONNX Runtime's attention on CPU, with the fastest of its operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attnspan_lab.bench.devices import device_named
from attnspan_lab.bench.peers.job import Job, Ready, enough_memory, held_below

__all__ = ["OnnxRuntime"]

_TYPES = {
    torch.float32: "FLOAT",
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.int32: "INT32",
    torch.bool: "BOOL",
}
_TRIALS = 3


@dataclass(frozen=True)
class _Form:
    """One operator on a job's arrays. Missing inputs have an empty name."""

    op: str
    domain: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    result: Tensor
    attributes: dict[str, int] = field(default_factory=dict)


class OnnxRuntime:
    """`Attention` of opset 23, and ONNX Runtime's operators `MultiHeadAttention` and `GroupQueryAttention`.

    The first operator supports every mask and stores scores. The other two store no scores, and support only
    full and causal masks. Lengths and heads decide which one is fastest, so each job tries all before timing.
    """

    name = "onnxruntime"

    def refuses(self, job: Job) -> str | None:
        if job.device != "cpu":
            return f"it is compared on CPU, not on {job.device}"
        for package in ("onnxruntime", "onnx"):
            if find_spec(package) is None:
                return f"{package} is not installed"
        if job.backward:
            return "it has no backward pass"
        # By default, its products use AVX-512 if the processor has it, and nothing above.
        if held := held_below("avx512"):
            return held
        words: list[str] = []
        for form in _forms(job):
            try:
                _session(form, job.threads)
            except Exception as error:  # The error classes have no public name.
                words.append(f"it cannot load a model in {job.workload.dtype}: {error}")
            else:
                return None
        return words[0] if words else enough_memory(job, 2 * job.square_bytes, "the scores")

    def prepare(self, job: Job) -> Ready:
        tried: list[tuple[float, float, _Form, Callable[[], Tensor]]] = []
        for form in _forms(job):
            start = time.perf_counter()
            try:
                call = _bound(form, job.threads)
            except Exception:  # `refuses` found an operator that loads, but not necessarily this one.
                continue
            done = time.perf_counter()
            tried.append((min(_seconds(call) for _ in range(_TRIALS)), done - start, form, call))
        _, compiling, form, call = min(tried, key=lambda each: each[0])
        return Ready(call, device_named("cpu"), compile_seconds=compiling, note=form.op)


def _forms(job: Job) -> Iterator[_Form]:
    """Yield the operators that support the job's mask and whose memory is available."""
    w, q = job.workload, job.q
    if enough_memory(job, 2 * job.square_bytes, "the scores") is None:
        heads = {name: x.detach().contiguous() for name, x in zip("qkv", (job.q, job.k, job.v), strict=True)}
        if not (job.is_full or job.is_causal):
            # An additive mask, because a bool mask would be converted in each call.
            hidden = ~job.dense_mask()
            heads["mask"] = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
        out = torch.empty(w.batch, w.q_heads, w.q_len, w.v_dim, dtype=q.dtype)
        yield _Form("Attention", "", heads, {"out": out}, out, {"is_causal": int(job.needs_causal_flag)})
    if w.head_dim != w.v_dim:
        return
    rows = {name: _rows(x) for name, x in zip("qkv", (job.q, job.k, job.v), strict=True)}
    out = torch.empty_like(rows["q"])
    result = out.view(w.batch, w.q_len, w.q_heads, w.v_dim).transpose(1, 2)
    if job.is_full and not job.grouped:
        yield _Form(
            "MultiHeadAttention", "com.microsoft", rows, {"out": out}, result, {"num_heads": w.q_heads}
        )
    if job.needs_causal_flag:
        # This decoder operator also writes keys and values into a cache, which starts empty.
        lengths = {
            "last": torch.full((w.batch,), w.k_len - 1, dtype=torch.int32),
            "total": torch.tensor([w.k_len], dtype=torch.int32),
        }
        cached = {
            name: torch.empty(x.shape, dtype=q.dtype) for name, x in (("keys", job.k), ("values", job.v))
        }
        counts = {"num_heads": w.q_heads, "kv_num_heads": w.kv_heads}
        outputs = {"out": out, **cached}
        yield _Form("GroupQueryAttention", "com.microsoft", rows | lengths, outputs, result, counts)


def _rows(x: Tensor) -> Tensor:
    """View (B, H, S, D) as (B, S, H * D), which is the layout in memory."""
    return x.detach().transpose(1, 2).flatten(2)


def _session(form: _Form, threads: int) -> Any:
    onnx, runtime = import_module("onnx"), import_module("onnxruntime")
    helper = onnx.helper

    def declared(arrays: dict[str, Tensor]) -> list[Any]:
        return [helper.make_tensor_value_info(name, _type(x), list(x.shape)) for name, x in arrays.items()]

    names = list(form.inputs)
    if form.op == "GroupQueryAttention":
        names[3:3] = ["", ""]  # No cached keys and values.
    node = helper.make_node(form.op, names, list(form.outputs), domain=form.domain, **form.attributes)
    graph = helper.make_graph([node], "attention", declared(form.inputs), declared(form.outputs))
    versions = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    # Use the file format of opset 23, because a newer `onnx` would write a newer format.
    model = helper.make_model(graph, opset_imports=versions, ir_version=11)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # By default, threads also spin for 30 ms after a call. They would slow down the next peer.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _type(x: Tensor) -> int:
    return int(getattr(import_module("onnx").TensorProto, _TYPES[x.dtype]))


def _bound(form: _Form, threads: int) -> Callable[[], Tensor]:
    """Make a call on the memory of the form's arrays, without copies."""
    session = _session(form, threads)
    binding = session.io_binding()
    for bind, arrays in ((binding.bind_input, form.inputs), (binding.bind_output, form.outputs)):
        for name, x in arrays.items():
            bind(name, "cpu", 0, _type(x), list(x.shape), x.data_ptr())

    def call(_kept: _Form = form) -> Tensor:
        session.run_with_iobinding(binding)
        return form.result

    return call


def _seconds(call: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
