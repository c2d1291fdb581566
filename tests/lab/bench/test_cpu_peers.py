"""OpenVINO, ONNX Runtime and inductor compute the same attention on our threads, or say why not."""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnspan.reference import backward, forward
from attnspan_lab.bench.cells import Workload
from attnspan_lab.bench.peers import Job, inductor, onnxruntime_peer, openvino_peer, peers_by_name
from attnspan_lab.bench.peers import job as jobs
from attnspan_lab.bench.processes import threads_set
from attnspan_lab.bench.runner import difference

OPENVINO, ONNXRUNTIME, INDUCTOR = (peers_by_name()[name] for name in ("openvino", "onnxruntime", "inductor"))
MODULES = {"openvino": openvino_peer, "onnxruntime": onnxruntime_peer, "inductor": inductor}

# mask, q_len, k_len, query heads, key heads, D, Dv, batch, threads
SHAPES = (
    ("full", 96, 96, 4, 4, 32, 32, 1, 1),
    ("full", 70, 96, 4, 2, 128, 64, 2, 2),
    ("causal", 96, 96, 4, 4, 256, 256, 1, 2),
    ("causal", 96, 96, 4, 2, 64, 64, 2, 1),
    ("causal", 8, 96, 4, 1, 64, 64, 1, 2),
    ("causal", 1, 96, 4, 4, 64, 64, 1, 1),
    ("causal & packed(3)", 96, 96, 4, 4, 64, 32, 1, 2),
    ("window(5)", 96, 96, 6, 2, 64, 64, 2, 2),
)


def _needs_openvino():
    if not find_spec("openvino"):
        pytest.skip("openvino is not installed")


def _job(shape=SHAPES[2], dtype="float32", mode="forward"):
    mask, q_len, k_len, q_heads, kv_heads, dim, v_dim, batch, threads = shape
    with threads_set(threads):
        return Job.make(
            Workload("w", "f", batch, q_heads, kv_heads, q_len, k_len, dim, v_dim, dtype, mask), mode, "cpu"
        )


def _expected(job):
    q, k, v, dout = (x.detach().double().numpy() for x in (job.q, job.k, job.v, job.dout))
    bounds, scale = job.prepared.lowered.bounds.numpy(), q.shape[-1] ** -0.5
    out = forward(q, k, v, bounds, scale)[0]
    if not job.backward:
        return [torch.from_numpy(out)]
    gradients = backward(dout, np.zeros(out.shape[:3]), q, k, v, bounds, scale)
    return [torch.from_numpy(x) for x in (out, *gradients)]


def _bound(job, expected):
    """A small multiple of the error of torch's own attention in the dtype; float32's is far below 1e-5."""
    theirs = sdpa(job.q, job.k, job.v, attn_mask=job.dense_mask(), enable_gqa=job.grouped)
    return max(1e-5, 3 * difference(expected, [theirs]))


def _is_right(job, call):
    expected = _expected(job)
    bound = _bound(job, expected)
    assert difference(expected, [call()]) < bound
    # A second call finds its inputs as they were.
    assert difference(expected, [call()]) < bound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_openvino_computes_what_the_reference_does(shape, dtype):
    _needs_openvino()
    job = _job(shape, dtype)
    if (reason := OPENVINO.refuses(job)) is not None:
        assert reason.endswith("not in bfloat16"), reason
        pytest.skip(reason)
    _is_right(job, OPENVINO.prepare(job).call)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_each_operator_of_onnx_runtime_computes_what_the_reference_does(shape, dtype):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    job = _job(shape, dtype)
    assert ONNXRUNTIME.refuses(job) is None
    forms = list(onnxruntime_peer._forms(job))
    assert forms[0].op == "Attention"
    for form in forms:
        _is_right(job, onnxruntime_peer._bound(form, job.threads))


def test_onnx_runtime_refuses_a_dtype_by_its_own_words():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    reason = ONNXRUNTIME.refuses(_job(dtype="bfloat16"))
    assert reason is not None
    assert reason.startswith("it loads no model in bfloat16: [ONNXRuntimeError] : 9 : NOT_IMPLEMENTED")


def test_openvino_has_the_threads_of_the_job_and_says_which_kernels_run():
    _needs_openvino()
    for shape in (SHAPES[2], SHAPES[3]):
        job = _job(shape)
        note = OPENVINO.prepare(job).note
        assert "threads" not in note, note
        assert openvino_peer._core().get_property("CPU", "DEVICE_ARCHITECTURE") != "intel64" or "jit" in note
    # What it says of a number that it did not take.
    assert OPENVINO.prepare(replace(job, threads=10**4)).note.endswith(" threads")


def test_onnx_runtime_has_the_threads_of_the_job_and_takes_the_fastest_operator(monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    job = _job()
    first, second = onnxruntime_peer._forms(job)
    session = onnxruntime_peer._session(first, job.threads)
    assert session.get_session_options().intra_op_num_threads == job.threads == 2
    for fast in (first.op, second.op):
        monkeypatch.setattr(onnxruntime_peer, "_seconds", lambda call, fast=fast: _op(call) != fast)
        assert ONNXRUNTIME.prepare(job).note == fast
    monkeypatch.setattr(onnxruntime_peer, "enough_memory", lambda *_: "no memory")
    assert [form.op for form in onnxruntime_peer._forms(job)] == ["GroupQueryAttention"]
    assert ONNXRUNTIME.refuses(job) is None
    assert ONNXRUNTIME.refuses(_job(SHAPES[-1])) == "no memory"


def _op(call):
    return call.__defaults__[0].op


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(("shape", "dtype"), [(SHAPES[3], "float32"), (SHAPES[0], "bfloat16")])
def test_inductor_computes_it_by_products_of_matrices(shape, dtype):
    counters.clear()
    job = _job(shape, dtype, "forward+backward")
    # What an older run left on disk would not be counted.
    uncached = (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    )
    with threads_set(job.threads), uncached[0], uncached[1]:
        result = INDUCTOR.prepare(job).call()
    bound = {"float32": 1e-5, "bfloat16": 1e-2}[dtype]
    assert difference(_expected(job), list(result)) < bound
    assert counters["inductor"]["fuse_attention"] == 0, "inductor put SDPA in its place"
    assert counters["inductor"]["extern_calls"] == 6, "two products forward, four backward"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_what_inductor_compiles_is_right_and_a_function_of_its_own(monkeypatch, shape):
    compiled = []

    def compile(function, *, options, **_):
        assert options == {"cpp.threads": job.threads}
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    job = _job(shape)
    for _ in range(2):
        assert difference(_expected(job), [INDUCTOR.prepare(job).call()]) < 1e-5
    # The compiler gives up on a code object after eight recompilations.
    assert compiled[0].__code__ is not compiled[1].__code__


@pytest.mark.parametrize("name", MODULES)
def test_the_peer_is_of_cpus(name):
    reason = peers_by_name()[name].refuses(replace(_job(), device="cuda"))
    assert reason is not None
    assert reason.endswith("cuda")


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(openvino_peer, "find_spec", lambda _: None)
    assert OPENVINO.refuses(_job()) == "openvino is not installed"
    for missing in ("onnxruntime", "onnx"):
        monkeypatch.setattr(onnxruntime_peer, "find_spec", lambda name, gone=missing: name != gone or None)
        assert ONNXRUNTIME.refuses(_job()) == f"{missing} is not installed"


@pytest.fixture
def installed(monkeypatch):
    """As if everything were installed: what is refused before a package is loaded."""
    for module in (openvino_peer, onnxruntime_peer):
        monkeypatch.setattr(module, "find_spec", lambda _: True)


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_gradients_are_refused(installed, name):
    assert peers_by_name()[name].refuses(_job(mode="forward+backward")) == "it has no backward pass"


def test_openvino_refuses_what_it_would_compute_in_another_precision(installed, monkeypatch):
    plugin = SimpleNamespace(get_property=lambda *_: ["FP32", "BF16", "INT8"])
    monkeypatch.setattr(openvino_peer, "_core", lambda: plugin)
    reason = "its CPU plugin computes in float32 and bfloat16 here, not in float16"
    assert OPENVINO.refuses(_job(dtype="float16")) == reason
    assert OPENVINO.refuses(_job(dtype="bfloat16")) is None
    monkeypatch.setattr(openvino_peer, "enough_memory", lambda _job, needed, what: (needed, what))
    assert OPENVINO.refuses(_job()) == (9.0 * 96 * 96, "the array of its mask")
    assert OPENVINO.refuses(_job(SHAPES[0])) == (0.0, "the array of its mask")


@pytest.fixture
def held(monkeypatch):
    """attnspan on AVX2, on a machine with AVX-512 and its bfloat16 products; no peer is held."""
    levels = ["portable", "avx2", "avx512", "avx512bf16"]
    core = SimpleNamespace(core=object(), isa=lambda: "avx2", isa_levels=lambda: levels)
    monkeypatch.setattr(jobs, "cpu", core)
    for name in (*openvino_peer._LEVELS, *inductor._LEVELS):
        monkeypatch.delenv(name, raising=False)
    return core


def test_peers_are_held_to_our_level_or_say_that_they_are_not(installed, held, monkeypatch):
    plugin = SimpleNamespace(get_property=lambda *_: ["FP32"])
    monkeypatch.setattr(openvino_peer, "_core", lambda: plugin)
    start = "attnspan is limited to avx2 and this peer is not: "
    assert OPENVINO.refuses(_job()) == f"{start}set OV_CPU_MAX_ISA, ONEDNN_MAX_CPU_ISA"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert INDUCTOR.refuses(_job()) == f"{start}set ATEN_CPU_CAPABILITY, MKL_ENABLE_INSTRUCTIONS"
    monkeypatch.setenv("OV_CPU_MAX_ISA", "AVX2")
    assert OPENVINO.refuses(_job()) is None
    assert ONNXRUNTIME.refuses(_job()) == f"{start}no setting limits this peer"
    # Its products are those of AVX-512 anyway.
    held.isa = lambda: "avx512"
    assert jobs.held_below("avx512") is None
    assert (
        jobs.held_below() == "attnspan is limited to avx512 and this peer is not: no setting limits this peer"
    )
    held.isa_levels = lambda: ["portable", "avx2"]
    assert jobs.held_below("avx512") is None


def test_openvino_is_held_by_both_of_its_variables(installed, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.delenv("OV_CPU_MAX_ISA", raising=False)
    reason = OPENVINO.refuses(_job())
    assert reason == "OV_CPU_MAX_ISA and ONEDNN_MAX_CPU_ISA differ: set both to the same level"


def test_inductor_refuses_scores_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(
        inductor, "enough_memory", lambda _job, needed, what: (needed / _job.square_bytes, what)
    )
    assert INDUCTOR.refuses(_job()) == (3, "the scores")
    assert INDUCTOR.refuses(_job(mode="forward+backward")) == (6, "the scores")


@pytest.mark.slow
def test_openvino_tells_nobody_of_its_use():
    _needs_openvino()
    code = """
import os
os.register_at_fork(before=lambda: print("a process was started"))
from attnspan_lab.bench.peers import openvino_peer
print(openvino_peer._core().available_devices)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "['CPU']\n"
