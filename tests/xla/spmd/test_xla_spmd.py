"""Attention over 4 devices by SPMD: the oracle's results, nothing gathered, two failures of the field."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from samples.conformance import OPTIONS, RANDOM, SMALL
from samples.parts import MASKS, Case
from torch_xla.experimental.custom_kernel import _shard_map
from xla_cells import check, on_xla
from xla_meshes import SPLITS, mesh

import attnspan as a
from attnspan import reference
from attnspan.errors import OptionError
from attnspan.xla import attention

MANY = {"batch": 4, "heads": 4, "kv_heads": 2}
SEGMENTS = replace(SMALL, mask="segments", **MANY)


def places(name: str) -> dict[str, object]:
    return {"mesh": mesh(), "partition_spec": SPLITS[name]}


@pytest.mark.parametrize(
    "option", ["T5", "dense, one for all", "alibi, signed, per batch row", "everything, dense"]
)
def test_options_split_by_batch_and_heads(option: str) -> None:
    check(replace(SEGMENTS, options=OPTIONS[option]), places("batch and heads"))


@pytest.mark.parametrize("split", SPLITS)
def test_splits(split: str) -> None:
    check(replace(RANDOM, options=OPTIONS["everything, indices given"], **MANY), places(split))


@pytest.mark.parametrize("mask", ["R = 1 per head", "R = 5 per batch row and head", "cache", "dense, 4 rows"])
def test_masks_split_by_batch_and_heads(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def dense(case: Case) -> tuple[a.Mask, None]:
        visible = torch.rand(*case.sizes.values(), generator=torch.Generator().manual_seed(2)) > 0.8
        return a.from_dense(visible, max_runs=9), None

    monkeypatch.setitem(MASKS, "dense, 4 rows", dense)
    check(replace(SEGMENTS, options=("dropout",), mask=mask), places("batch and heads"))


def test_without_a_spec_the_whole_is_computed() -> None:
    check(replace(SEGMENTS, options=OPTIONS["everything"]))


def test_a_global_mesh_and_the_other_layout() -> None:
    q = torch.randn(4, 6, 4, 8)
    before = xs.get_global_mesh()
    try:
        xs.set_global_mesh(mesh())
        got = attention(*on_xla((q, q, q)), layout="bshd", partition_spec=("data", None, "model", None))
    finally:
        xs.set_global_mesh(before)
    x = q.transpose(1, 2)
    exact, _ = reference.forward(x, x, x, a.full().spans(6, 6).bounds, 8**-0.5)
    assert abs(got.transpose(1, 2).cpu().numpy() - exact).max() < 1e-6


def problem() -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """The field's problem, with ids of every batch row, and the exact result."""
    torch.manual_seed(3)
    q, ids = torch.randn(4, 2, 64, 32), torch.arange(64).div(16, rounding_mode="floor").repeat(4, 1)
    ids[1::2] = torch.arange(64).div(8, rounding_mode="floor")
    bounds = a.segments(ids).spans(64, 64, batch=4).bounds
    return q, ids, reference.forward(q, q, q, bounds, 1.0)[0]


def plain(q, k, v, ids=None):
    """What a kernel of one device computes, as the field's does by default: scores are not scaled."""
    scores = q @ k.transpose(-1, -2)
    if ids is not None:
        scores = scores.masked_fill(ids[:, None, :, None] != ids[:, None, None, :], -1e30)
    return scores.softmax(-1) @ v


def test_unsharded_ids_fail_in_the_field_and_not_here() -> None:
    q, ids, exact = problem()
    spec = ("data", None, None, None)
    field = _shard_map(plain, mesh(), [spec, spec, spec, (None, None)], [spec])
    with pytest.raises(RuntimeError, match=r"f32\[2,2,64,64\].*pred\[4,1,64,64\]"):
        field(*on_xla((q, q, q, ids))).cpu()
    for specs in ({}, {"q_ids": (None, None)}, {"q_ids": ("data", None)}, {"q_ids": (None, "model")}):
        places = {"mesh": mesh(), "partition_spec": spec, "specs": specs}
        got = attention(*on_xla((q, q, q)), scale=1.0, mask=a.segments(on_xla(ids)), **places)
        assert abs(got.cpu().numpy() - exact).max() < 1e-5
    q, ids = on_xla((q, ids))  # Tensors that lie elsewhere are moved.
    xs.mark_sharding(q, mesh(), (None, None, "data", None))
    xs.mark_sharding(ids, mesh(), (None, "model"))
    got = attention(q, q, q, scale=1.0, mask=a.segments(ids), mesh=mesh(), partition_spec=spec)
    assert abs(got.cpu().numpy() - exact).max() < 1e-5


def test_a_split_sequence_is_wrong_in_the_field_and_refused_here() -> None:
    q, _, _ = problem()
    spec = (None, None, "data", None)
    k, v = torch.randn(2, 4, 2, 64, 32)
    exact, _ = reference.forward(q, k, v, a.full().spans(64, 64).bounds, 1.0)
    wrong = _shard_map(plain, mesh(), [spec] * 3, [spec])(*on_xla((q, k, v))).cpu().numpy()
    assert wrong.shape == exact.shape
    assert abs(wrong - exact).max() > 2
    with pytest.raises(OptionError, match=r"partition_spec: length: .*plan of attnspan.parallel.Layout"):
        attention(*on_xla((q, k, v)), mesh=mesh(), partition_spec=spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (("data", None, None), "4 entries"),
        ("data", "4 entries"),
        (("date", None, None, None), "axes of the mesh, data, model"),
        ((2, None, None, None), "axes of the mesh"),
        ((True, None, None, None), "axes of the mesh"),
        (("data", "data", None, None), "each mesh axis once"),
        (("data", 0, None, None), "each mesh axis once"),
        ((None, None, None, "model"), "head_dim"),
        ((None, None, ("data", "model"), None), "length"),
    ],
)
def test_wrong_specs(spec: object, words: str) -> None:
    q = on_xla(torch.zeros(4, 4, 8, 8))
    with pytest.raises(OptionError, match=words):
        attention(q, q, q, mesh=mesh(), partition_spec=spec)


def test_other_wrong_calls() -> None:
    q = on_xla(torch.zeros(4, 3, 8, 8))
    on, spec = {"mesh": mesh()}, {"partition_spec": ("data", None, None, None)}
    sinks, heads = {"sinks": q[0, :, 0, 0]}, {"partition_spec": (None, "model", None, None)}
    for given, words in (
        ({**on, **heads}, r"partition_spec: heads: .*multiple of 2, got 3"),
        (spec, "mesh: expected a mesh of torch_xla"),
        (on, "mesh: expected a partition_spec"),
        ({"specs": {"sinks": (None,)}}, "specs: expected partition_spec"),
        (
            {**sinks, **on, **spec, "specs": {"q_ids": (None, None)}},
            r"specs: expected tensors of this call \(sinks\), got 'q_ids'",
        ),
        ({**sinks, **on, **spec, "specs": {"sinks": (None, None)}}, "specs: sinks: expected 1 entries"),
    ):
        with pytest.raises(OptionError, match=words):
            attention(q, q, q, **given)


@pytest.mark.parametrize("split", ["batch", "batch and heads"])
def test_nothing_is_gathered(split: str, tmp_path: Path) -> None:
    flags = f"{os.environ['XLA_FLAGS']} --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    job = Path(__file__).with_name("split_step.py")
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(job), split],
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [x.read_text() for x in tmp_path.glob("*after_optimizations.txt")]
    programs = [text for text in programs if "while" in text]
    assert programs
    sends = re.compile(r"\b(all-gather|all-to-all|collective-permute|collective-broadcast)(-start)?\(.*")
    found = [match.group() for text in programs for match in sends.finditer(text)]
    assert not found


def test_compiled_code_on_the_global_mesh() -> None:
    q, ids, exact = problem()
    before = xs.get_global_mesh()
    torch._dynamo.reset()

    def f(q, ids):
        spec = ("data", "model", None, None)
        return attention(q, q, q, scale=1.0, mask=a.segments(ids), partition_spec=spec)

    try:
        xs.set_global_mesh(mesh())
        q, ids = on_xla(q).requires_grad_(), on_xla(ids)
        results = []
        for call in (f, torch.compile(f, backend="openxla", fullgraph=True)):
            out = call(q, ids)
            results.append((out, *torch.autograd.grad(out.square().sum(), q)))
            torch_xla.sync()
    finally:
        xs.set_global_mesh(before)
    for plain_result, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled.cpu(), plain_result.cpu())
    assert abs(out.detach().cpu().numpy() - exact).max() < 1e-5


def test_another_mesh_in_compiled_code_is_refused() -> None:
    torch._dynamo.reset()
    q = on_xla(torch.zeros(4, 4, 8, 8))
    other = xs.Mesh(np.arange(4), (4,), ("data",))
    spec = ("data", None, None, None)
    compiled = torch.compile(
        lambda q: attention(q, q, q, mesh=other, partition_spec=spec), backend="openxla", fullgraph=True
    )
    with pytest.raises(OptionError, match="set_global_mesh"):
        compiled(q)
    assert attention(q, q, q, mesh=other, partition_spec=spec).shape == q.shape
    assert compiled(q).shape == q.shape
