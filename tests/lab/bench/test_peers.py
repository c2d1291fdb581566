"""Each peer computes the same attention, or says why it does not."""

import warnings

import numpy as np
import pytest
import torch

from attnspan.reference import backward, forward
from attnspan_lab.bench.cells import Workload
from attnspan_lab.bench.peers import PEERS, Job, peers_by_name
from attnspan_lab.bench.peers.flex import mask_mod
from attnspan_lab.bench.peers.job import enough_memory
from attnspan_lab.bench.runner import difference

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
RUNNING = ("attnspan", "sdpa-flash", "sdpa-dense-mask", "sdpa-per-document", "attnspan-jax", "jax")


def _work(mask, *, q_len=24, k_len=24, dtype="float32", batch=1):
    return Workload("w", "f", batch, 4, 2, q_len, k_len, 16, 16, dtype, mask)


def _expected(job):
    q, k, v, dout = (x.detach().double().numpy() for x in (job.q, job.k, job.v, job.dout))
    bounds, scale = job.prepared.lowered.bounds.numpy(), q.shape[-1] ** -0.5
    out = forward(q, k, v, bounds, scale)[0]
    if not job.backward:
        return [torch.from_numpy(out)]
    gradients = backward(dout, np.zeros(out.shape[:3]), q, k, v, bounds, scale)
    return [torch.from_numpy(x) for x in (out, *gradients)]


def _cases():
    for name in RUNNING:
        for mask in MASKS:
            # Every mask of JAX is compiled, so it gets one of each kind that it has a form of its own for.
            if name == "jax" and mask not in ("full", "causal", "window(3, 2)", "causal & packed(3)"):
                continue
            # Ours has one form for all, with one span to a row and with several.
            if name != "attnspan-jax" or mask in (
                "causal & packed(3)",
                "causal & (window(4) | global_keys(2))",
            ):
                yield name, mask


@pytest.mark.parametrize(("name", "mask"), list(_cases()))
def test_the_peer_computes_what_the_reference_does(name, mask):
    job = Job.make(_work(mask), "forward+backward", "cpu")
    peer = peers_by_name()[name]
    if (reason := peer.refuses(job)) is not None:
        assert name in ("sdpa-flash", "sdpa-dense-mask", "sdpa-per-document"), reason
        return
    ready = peer.prepare(job)
    result = ready.call()
    ready.device.synchronize(result)
    assert difference(_expected(job), list(ready.to_torch(result))) < 1e-5


@pytest.mark.parametrize("name", [name for name in RUNNING if name != "jax"])
def test_forward_alone_returns_the_output_alone(name):
    job = Job.make(_work("causal & packed(3)" if name == "sdpa-per-document" else "causal"), "forward", "cpu")
    ready = peers_by_name()[name].prepare(job)
    assert difference(_expected(job), list(ready.to_torch(ready.call()))) < 1e-5


def _refusers(mask, mode="forward"):
    job = Job.make(_work(mask), mode, "cpu")
    return {peer.name: reason for peer in PEERS if (reason := peer.refuses(job)) is not None}


def test_who_runs_what_on_cpu_and_why_not():
    ours = {f"attnspan-{name}" for name in ("vendor", "flex", "triton")}
    cuda_only = {"sdpa-efficient", "sdpa-cudnn", "flash-attn", "flash-attn-3", "flash-attn-4", *ours}
    for mask, others in (
        ("causal", {"sdpa-per-document"}),
        ("full", {"sdpa-per-document", "sdpa-dense-mask"}),
        ("causal & packed(2)", {"sdpa-flash"}),
    ):
        packages = {"tokamax", "jax", "attnspan-jax", "openvino", "onnxruntime"}
        assert set(_refusers(mask)) - packages == cuda_only | others
    reasons = _refusers("window(3)", "forward+backward")
    assert reasons["sdpa-flash"] == "it supports only full masks and causal masks with Sq = Sk"
    assert reasons["sdpa-per-document"] == "the mask is no document mask"
    assert reasons["flex"] == "it has no backward pass on CPU"
    assert reasons["flash-attn"] == "it runs on CUDA devices, not on cpu"


def test_one_query_that_sees_every_key_needs_no_mask():
    job = Job.make(_work("causal", q_len=1), "forward", "cpu")
    assert job.is_full
    assert peers_by_name()["sdpa-flash"].refuses(job) is None


def test_causal_masks_of_oblong_problems_are_not_left_to_other_conventions():
    job = Job.make(_work("causal", q_len=4), "forward", "cpu")
    assert peers_by_name()["sdpa-flash"].refuses(job) is not None
    found = peers_by_name()["jax"].prepare(job)
    assert difference(_expected(job), list(found.to_torch(found.call()))) < 1e-5


def test_memory_that_is_not_there_is_a_reason():
    job = Job.make(_work("causal"), "forward", "cpu")
    assert enough_memory(job, 1.0, "it") is None
    reason = enough_memory(job, 2.0**50, "a dense mask")
    assert reason is not None
    assert reason.startswith("a dense mask would need 1048576.0 GiB of the ")


@pytest.mark.parametrize("mask", MASKS)
def test_flex_sees_the_mask_that_attnspan_sees(mask):
    create_mask = pytest.importorskip("torch.nn.attention.flex_attention").create_mask
    for q_len in (24, 6):
        if "packed" in mask and q_len != 24:
            continue  # Documents of queries and of keys would have other lengths.
        job = Job.make(_work(mask, q_len=q_len), "forward", "cpu")
        dense = create_mask(mask_mod(job), 1, 1, q_len, 24, device="cpu")
        assert torch.equal(dense, job.dense_mask()), q_len


def test_flex_computes_the_same_attention(monkeypatch):
    # Compilation takes many seconds on CPU; the function computes the same without it, and warns of that.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    job = Job.make(_work("causal & packed(3)"), "forward", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = peers_by_name()["flex"].prepare(job).call()
    assert difference(_expected(job), [out]) < 1e-5


@pytest.mark.parametrize("name", ["jax", "attnspan-jax"])
def test_jax_gets_half_precision_as_it_is(name):
    job = Job.make(_work("causal", dtype="bfloat16"), "forward", "cpu")
    ready = peers_by_name()[name].prepare(job)
    result = ready.call()
    assert str(result.dtype) == "bfloat16"
    assert difference(_expected(job), list(ready.to_torch(result))) < 2e-2
    assert ready.trace_seconds > 0
    assert ready.compile_seconds > 0


def test_difference_sees_every_kind_of_wrong_result():
    right = [torch.ones(3), torch.ones(2)]
    assert difference(right, [torch.ones(3), torch.ones(2)]) == 0
    assert difference(right, [torch.ones(3)]) == float("inf")
    assert difference(right, [torch.ones(3), torch.ones(3)]) == float("inf")
    assert difference(right, [torch.ones(3), -torch.ones(2)]) == 2.0
    assert not difference(right, [torch.ones(3), torch.tensor([1.0, float("nan")])]) <= 1e9
    assert not difference(right, [torch.tensor([1.0, float("nan"), 1.0]), torch.ones(2)]) <= 1e9
