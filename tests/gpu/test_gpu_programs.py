"""Compiled programs on the GPU: graphs, checkpoints, CUDA graphs, several ranks, the training job."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from on_gpu import move, needs_gpu
from samples.bands import BANDS, qkv
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from attnspan import causal, documents
from attnspan.call.options import alibi
from attnspan.torch import StaticCache, attention, checkpoint_policy

pytestmark = needs_gpu
BACKENDS = ["vendor", "flex", "triton"]
HERE = Path(__file__).parent


@pytest.mark.parametrize("options", [False, True], ids=["plain", "options"])
@pytest.mark.parametrize("checkpointed", ["none", "full", "selective"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_steps_compile_once(backend: str, checkpointed: str, options: bool) -> None:
    if (backend, options) == ("vendor", True):
        pytest.skip("it has no options")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    slopes, sinks = torch.rand(8, device="cuda"), torch.randn(8, device="cuda")
    weights = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16) / 16
    leaves = [weights, slopes, sinks] if options else [weights]
    for leaf in leaves:
        leaf.requires_grad_()

    def block(x: Tensor, ends: Tensor) -> Tensor:
        q, k = (x @ weights).unflatten(2, (8, 64)), (x @ weights[:, :128]).unflatten(2, (2, 64))
        more: dict[str, Any] = {"softcap": 5.0, "bias": alibi(slopes), "sinks": sinks} if options else {}
        mask = causal() & documents(ends)
        found = attention(q, k, k, mask=mask, layout="bshd", backend=backend, **more)
        return x + found.flatten(2) @ weights.T

    keep = partial(create_selective_checkpoint_contexts, checkpoint_policy)
    selective: Any = {"context_fn": keep} if checkpointed == "selective" else {}

    def step(x: Tensor, ends: Tensor) -> Tensor:
        if checkpointed == "none":
            return block(x, ends)
        return checkpoint(block, x, ends, use_reentrant=False, **selective)  # type: ignore[no-any-return]

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for i in range(30):
        length = 256 + 64 * (i % 5)
        x = torch.randn(1, length, 256, device="cuda", dtype=torch.bfloat16)
        ends = torch.tensor([0, 3 + i, 200, length], device="cuda")
        found, wanted = compiled(x, ends), step(x, ends)
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)
        steps = (torch.autograd.grad(y.float().square().mean(), leaves) for y in (found, wanted))
        for a, b in zip(*steps, strict=True):
            assert (a.float() - b.float()).norm() <= 3e-2 * b.float().norm()
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", [None, "flex", "triton"])
def test_decoding_in_a_cuda_graph(backend: str | None) -> None:
    torch._dynamo.reset()
    cache = StaticCache(2, 2, 128, 64, dtype=torch.bfloat16, device="cuda")

    @torch.no_grad()
    def step(q: Tensor, k: Tensor) -> Tensor:
        keys, values = cache.update(k, k)
        return attention(q, keys, values, mask=cache.mask(1), backend=backend)

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    kind: Any = {"device": "cuda", "dtype": torch.bfloat16}
    tokens = [[torch.randn(2, h, 1, 64, **kind) for h in (8, 2)] for _ in range(8)]
    found = [compiled(*x).clone() for x in tokens]
    cache.reset()
    for a, x in zip(found, tokens, strict=True):
        torch.testing.assert_close(a, step(*x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["causal", "documents"])
def test_a_recorded_call_is_replayed_with_new_data(name: str) -> None:
    q, k, v = (x.detach() for x in move(qkv(1, 64, 64)))
    mask = move(BANDS[name])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attention(q, k, v, mask=mask)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, mask=mask)
    for _ in range(3):
        q.normal_()
        graph.replay()
        torch.testing.assert_close(out, attention(q, k, v, mask=mask), rtol=2e-2, atol=2e-2)


def _torchrun(ranks: int, *command: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _counts() -> list[int]:
    most = torch.cuda.device_count() if torch.cuda.is_available() else 1
    return sorted({n for n in (1, 2, 4, 8) if n <= most})


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
@pytest.mark.parametrize("ranks", _counts())
def test_context_parallelism_over_nccl(ranks: int, strategy: str) -> None:
    assert "equal to one rank" in _torchrun(ranks, str(HERE / "ranks_job.py"), strategy)


@pytest.mark.parametrize("ranks", _counts())
def test_the_training_job(ranks: int, tmp_path: Path) -> None:
    sizes = ("--cp", str(ranks), "--fsdp", "--steps", "20")
    options = ("--device", "cuda", *sizes, "--runs-dir", str(tmp_path))
    out = _torchrun(ranks, str(HERE.parents[1] / "examples/train"), *options)
    assert "step" in out, out
