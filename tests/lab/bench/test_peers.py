"""Each peer computes the same attention on our threads, or says why it does not."""

import subprocess
import sys
import warnings
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
from attnspan_lab.bench.peers import PEERS, Job, onnxruntime_peer, openvino_peer, peers_by_name
from attnspan_lab.bench.peers import job as jobs
from attnspan_lab.bench.peers.flex import mask_mod
from attnspan_lab.bench.peers.job import enough_memory
from attnspan_lab.bench.processes import threads_set
from attnspan_lab.bench.runner import difference

BY_NAME = peers_by_name()
MASKS = (
    "full",
    "causal",
    "window(5)",
    "window(3, 2)",
    "causal & packed(3)",
    "packed(4)",
    "causal | prefix(7)",
    "causal & (window(4) | global_keys(2))",
)
# Every mask of JAX is compiled, so it gets one of each kind that it has a form of its own for.
OF_JAX = {
    "jax": ("full", "causal", "window(3, 2)", "causal & packed(3)"),
    "attnspan-jax": ("causal & packed(3)", "causal & (window(4) | global_keys(2))"),
}
RUNNING = ("attnspan", "sdpa-flash", "sdpa-dense-mask", "sdpa-per-document", "attnspan-jax", "jax")
# mask, q_len, k_len, query heads, key heads, D, Dv, batch, threads
SHAPES = (
    ("full", 70, 96, 4, 2, 128, 64, 2, 2),
    ("causal", 96, 96, 4, 4, 256, 256, 1, 2),
    ("causal", 96, 96, 4, 2, 64, 64, 2, 1),
    ("causal", 8, 96, 4, 1, 64, 64, 1, 2),
    ("causal & packed(3)", 96, 96, 4, 4, 64, 32, 1, 2),
    ("window(5)", 96, 96, 6, 2, 64, 64, 2, 2),
)
SQUARE, GROUPED = SHAPES[1:3]


def _job(shape=SQUARE, dtype="float32", mode="forward"):
    mask, q_len, k_len, q_heads, kv_heads, dim, v_dim, batch, threads = shape
    work = Workload("w", "f", batch, q_heads, kv_heads, q_len, k_len, dim, v_dim, dtype, mask)
    with threads_set(threads):
        return Job.make(work, mode, "cpu")


def _small(mask, mode="forward", q_len=24, dtype="float32"):
    return _job((mask, q_len, 24, 4, 2, 16, 16, 1, None), dtype, mode)


def _expected(job):
    q, k, v, dout = (x.detach().double().numpy() for x in (job.q, job.k, job.v, job.dout))
    bounds, scale = job.prepared.lowered.bounds.numpy(), q.shape[-1] ** -0.5
    out = forward(q, k, v, bounds, scale)[0]
    gradients = backward(dout, np.zeros(out.shape[:3]), q, k, v, bounds, scale) if job.backward else ()
    return [torch.from_numpy(x) for x in (out, *gradients)]


def _error(job, ready):
    """The error of a second call, which finds its inputs as they were."""
    ready.call()
    result = ready.call()
    ready.device.synchronize(result)
    return difference(_expected(job), list(ready.to_torch(result)))


@pytest.mark.parametrize("mode", ["forward", "forward+backward"])
@pytest.mark.parametrize(("name", "mask"), [(x, y) for x in RUNNING for y in OF_JAX.get(x, MASKS)])
def test_the_peer_computes_what_the_reference_does(name, mask, mode):
    job = _small(mask, mode)
    if (reason := BY_NAME[name].refuses(job)) is not None:
        assert name.startswith("sdpa-"), reason
        return
    assert _error(job, BY_NAME[name].prepare(job)) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_other_engines_compute_what_the_reference_does(name, shape, dtype):
    job, peer = _job(shape, dtype), BY_NAME[name]
    reason = peer.refuses(job)
    if reason is not None:
        assert reason.endswith((f"not in {dtype}", "is not installed")) or "NOT_IMPLEMENTED" in reason
        pytest.skip(reason)
    ready = peer.prepare(job)
    assert "threads" not in ready.note, "it has the job's"
    # A small multiple of the error of torch's own attention in the dtype; float32's is far below 1e-5.
    theirs = sdpa(job.q, job.k, job.v, attn_mask=job.dense_mask(), enable_gqa=job.grouped)
    assert _error(job, ready) < max(1e-5, 3 * difference(_expected(job), [theirs]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own
def test_inductor_computes_it_by_products_of_matrices():
    counters.clear()
    job = _job(GROUPED, mode="forward+backward")
    # What an older run left on disk would not be counted.
    uncached = inductor_config.patch(fx_graph_cache=False)
    with threads_set(job.threads), uncached, functorch_config.patch(enable_autograd_cache=False):
        result = BY_NAME["inductor"].prepare(job).call()
    assert difference(_expected(job), list(result)) < 1e-5
    assert counters["inductor"]["fuse_attention"] == 0, "inductor put SDPA in its place"
    assert counters["inductor"]["extern_calls"] == 6, "two products forward, four backward"


@pytest.mark.parametrize(("name", "shape"), [("flex", SHAPES[4]), *(("inductor", x) for x in SHAPES)])
def test_compiled_peers_compute_it_uncompiled_too(monkeypatch, name, shape):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    job = _job(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex warns that it is not compiled
        for _ in range(2):
            assert difference(_expected(job), [BY_NAME[name].prepare(job).call()]) < 1e-5
    # The compiler gives up on a code object after eight recompilations.
    assert name == "flex" or compiled[0].__code__ is not compiled[1].__code__


@pytest.mark.parametrize("mask", MASKS)
def test_flex_sees_the_mask_that_attnspan_sees(mask):
    create_mask = pytest.importorskip("torch.nn.attention.flex_attention").create_mask
    # Documents of fewer queries than keys would have other lengths.
    for q_len in (24,) if "packed" in mask else (24, 6):
        job = _small(mask, q_len=q_len)
        dense = create_mask(mask_mod(job), 1, 1, q_len, 24, device="cpu")
        assert torch.equal(dense, job.dense_mask()), q_len


@pytest.mark.parametrize("name", ["jax", "attnspan-jax"])
def test_jax_gets_half_precision_as_it_is_and_oblong_masks_as_they_are_meant(name):
    job = _small("causal", q_len=4, dtype="bfloat16")
    ready = BY_NAME[name].prepare(job)
    assert str(ready.call().dtype) == "bfloat16"
    assert _error(job, ready) < 2e-2
    assert ready.trace_seconds > 0
    assert ready.compile_seconds > 0


def test_who_runs_what_on_cpu_and_why_not():
    def refused(job):
        return {peer.name: reason for peer in PEERS if (reason := peer.refuses(job)) is not None}

    ours = {f"attnspan-{name}" for name in ("vendor", "flex", "triton")}
    cuda_only = {"sdpa-efficient", "sdpa-cudnn", "flash-attn", "flash-attn-3", "flash-attn-4", *ours}
    packages = {"tokamax", "jax", "attnspan-jax", "openvino", "onnxruntime"}
    for mask, q_len, others in (
        ("causal", 24, {"sdpa-per-document"}),
        ("causal", 4, {"sdpa-per-document", "sdpa-flash"}),  # other libraries align it otherwise
        ("causal", 1, {"sdpa-per-document", "sdpa-dense-mask"}),  # one query that sees all
        ("full", 24, {"sdpa-per-document", "sdpa-dense-mask"}),
        ("causal & packed(2)", 24, {"sdpa-flash"}),
    ):
        assert set(refused(_small(mask, q_len=q_len))) - packages == cuda_only | others, (mask, q_len)
    reasons = refused(_small("window(3)", "forward+backward"))
    assert reasons["sdpa-flash"] == "it supports only full masks and causal masks with Sq = Sk"
    assert reasons["sdpa-per-document"] == "the mask is no document mask"
    assert reasons["flex"] == "it has no backward pass on CPU"
    assert reasons["flash-attn"] == "it runs on CUDA devices, not on cpu"
    on_cuda = replace(_small("causal"), device="cuda")
    for name in ("openvino", "onnxruntime", "inductor"):
        assert BY_NAME[name].refuses(on_cuda).endswith("cuda")


@pytest.fixture
def plugin(monkeypatch):
    """As if OpenVINO and ONNX Runtime were installed: what is refused before a package is loaded."""
    core = SimpleNamespace(get_property=lambda *_: ["FP32", "BF16", "INT8"])
    monkeypatch.setattr(openvino_peer, "_core", lambda: core)
    for module in (openvino_peer, onnxruntime_peer):
        monkeypatch.setattr(module, "find_spec", lambda _: True)
    for name in ("OV_CPU_MAX_ISA", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("plugin")
def test_other_engines_refuse_what_they_would_not_compute(monkeypatch):
    for name in ("openvino", "onnxruntime"):
        assert BY_NAME[name].refuses(_job(mode="forward+backward")) == "it has no backward pass"
    reason = "its CPU plugin computes in float32 and bfloat16 here, not in float16"
    assert BY_NAME["openvino"].refuses(_job(dtype="float16")) == reason
    assert BY_NAME["openvino"].refuses(_job(dtype="bfloat16")) is None
    for module in (openvino_peer, onnxruntime_peer):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    for name in ("openvino", "onnxruntime"):
        assert BY_NAME[name].refuses(_job()) == f"{name} is not installed"


@pytest.mark.slow
def test_memory_that_is_not_there_is_a_reason(monkeypatch):
    found = _small("causal")
    assert enough_memory(found, 1.0, "it") is None
    reason = enough_memory(found, 2.0**50, "a dense mask")
    assert reason.startswith("a dense mask would need 1048576.0 GiB of the ")
    huge = replace(_small("window(3)").workload, q_len=1 << 22, k_len=1 << 22)
    found = replace(_small("window(3)"), workload=huge)
    for name, what in (("sdpa-dense-mask", "a dense mask"), ("inductor", "the scores")):
        assert BY_NAME[name].refuses(found).startswith(f"{what} would need ")


@pytest.mark.usefixtures("plugin")
def test_peers_are_held_to_our_level_or_say_that_they_are_not(monkeypatch):
    # attnspan on AVX2, on a machine with AVX-512 and its bfloat16 products
    core = SimpleNamespace(core=object(), level="avx2", levels=["portable", "avx2", "avx512", "avx512bf16"])
    core.isa, core.isa_levels = lambda: core.level, lambda: core.levels
    monkeypatch.setattr(jobs, "cpu", core)
    start, refuses = "attnspan is limited to avx2 and this peer is not: ", BY_NAME["openvino"].refuses
    assert BY_NAME["onnxruntime"].refuses(_job()) == f"{start}no setting limits this peer"
    assert refuses(_job()) == f"{start}set OV_CPU_MAX_ISA, ONEDNN_MAX_CPU_ISA"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert BY_NAME["inductor"].refuses(_job()) == f"{start}set ATEN_CPU_CAPABILITY, MKL_ENABLE_INSTRUCTIONS"
    monkeypatch.setenv("OV_CPU_MAX_ISA", "AVX2")
    assert refuses(_job()) is None
    core.level = "avx512"
    assert jobs.held_below("avx512") is None, "its products are AVX-512's anyway"
    assert jobs.held_below().startswith("attnspan is limited to avx512 and this peer is not: no setting")
    core.levels = ["portable", "avx2", "avx512"]
    monkeypatch.delenv("OV_CPU_MAX_ISA")
    differ = "OV_CPU_MAX_ISA and ONEDNN_MAX_CPU_ISA differ: set both to the same level"
    assert refuses(_job()) == differ


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("openvino"), reason="openvino is not installed")
def test_openvino_tells_nobody_of_its_use():
    code = f"""
import os
os.register_at_fork(before=lambda: print("a process was started"))
from {openvino_peer.__name__} import _core
print(_core().available_devices)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "['CPU']\n"
