"""Transformers of diffusers on several ranks give the output and the gradients of one rank."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
sys.path.append(str(Path(__file__).parents[1] / "parallel"))

import worlds
from diffusers_parallel_jobs import Mesh
from diffusers_parallel_models import IMPORTED, Sizes
from worlds import world

from attnspan.integrations import _diffusers_rows as rows_of

# Before a process is forked: each rank would load the models anew.
worlds._processes.set_forkserver_preload([*worlds._PRELOADED, "attnspan.integrations.diffusers", *IMPORTED])

#: Models, and how often each attends over ranks.
MODELS = {
    "flux": 4,
    "flux2": 3,
    "qwen_image": 2,
    "sd3": 4,
    "wan": 2,
    "ltx": 2,
    "hunyuan_video": 3,
    "hunyuan_video_replaced": 3,
    "lumina2": 2,
    "pixart": 2,
    "cogvideox": 2,
    "mochi": 2,
}
#: Sums over all tokens of products of some hundred roundings, in float32; about 1e-6 was seen.
CLOSE = 5e-6


def check(ranks: int, *job: Any, calls: int, tokens: bool = True) -> None:
    for found in world(ranks).run("diffusers_parallel_jobs:same_as_one_rank", *job):
        assert found.pop("calls") == calls
        assert (found.pop("bytes") > 0) == tokens
        assert max(found.values()) < CLOSE, found


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
@pytest.mark.parametrize("name", MODELS)
def test_output_and_gradients_are_those_of_one_rank(
    name: str, strategy: str, ranks: int, padded: bool
) -> None:
    check(ranks, name, Mesh((ranks,)), strategy, Sizes(padded=padded), calls=MODELS[name])


def test_a_block_of_another_backend_holds_on_several_ranks() -> None:
    for found in world(2).run("diffusers_parallel_jobs:in_a_block", "flux"):
        assert found.pop("kernel") == 0
        assert found.pop("calls") == MODELS["flux"]
        del found["bytes"]
        assert max(found.values()) < CLOSE, found


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("flux_controlled", 4),
        ("sd3_controlled", 3),
        ("qwen_image_edited", 2),
        ("cogvideox_in_time", 2),
        ("wan_of_image", 2),
    ],
)
def test_what_models_take_besides(name: str, calls: int) -> None:
    check(3, name, Mesh((3,)), "exchange", calls=calls)


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("sd3", Mesh((2,), ("cfg",), "cfg"), "auto"),
        ("qwen_image", Mesh((2, 2), ("cfg", "cp"), "cfg"), "ring"),
        ("hunyuan_video", Mesh((4,)), "hybrid(2, 2, ring)"),
        pytest.param("flux", Mesh((2, 2), ("nodes", "node")), "hybrid(2, 2)", marks=pytest.mark.long),
        pytest.param("pixart", Mesh((3,), ("cfg",), "cfg"), "auto", marks=pytest.mark.long),
        pytest.param("cogvideox", Mesh((2, 2), ("cp", "cfg"), "cfg"), "ulysses", marks=pytest.mark.long),
        pytest.param("lumina2", Mesh((2, 2), ("cfg", "cp"), "cfg"), "exchange", marks=pytest.mark.long),
    ],
)
def test_batch_rows_and_hybrids(name: str, mesh: Mesh, strategy: str) -> None:
    ranks = int(torch.tensor(mesh.shape).prod())
    sizes = Sizes(padded=True, batch=3 if ranks == 3 else 2)
    tokens = mesh.names != ("cfg",)
    check(ranks, name, mesh, strategy, sizes, calls=MODELS[name] if tokens else 0, tokens=tokens)


#: Lumina 2 itself reads the lengths of captions on the host.
WHOLE = [name for name in MODELS if name not in ("lumina2", "qwen_image")]


@pytest.mark.parametrize("name", ["qwen_image", *(pytest.param(x, marks=pytest.mark.long) for x in WHOLE)])
def test_compiled_without_a_break(name: str) -> None:
    check(2, name, Mesh((2,)), "exchange", Sizes(padded=True), True, calls=MODELS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_layers_compiled_one_by_one(name: str) -> None:
    check(3, name, Mesh((3,)), "ulysses", Sizes(), "layers", calls=MODELS[name])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_layers_that_are_checkpointed_attend_twice(compiled: bool) -> None:
    check(2, "wan", Mesh((2,)), "ring", Sizes(), compiled, True, calls=0 if compiled else 4)


@pytest.mark.parametrize(
    "sizes", [Sizes(text=3, heads=4), Sizes(text=6, height=4, width=3, heads=6)], ids=str
)
def test_even_and_smallest_shares(sizes: Sizes) -> None:
    check(3, "flux", Mesh((3,)), "ulysses", sizes, calls=MODELS["flux"])


@pytest.mark.parametrize(("wrapper", "name"), [("ddp", "flux"), ("fsdp", "ltx")])
def test_the_mean_over_ranks_is_the_gradient(wrapper: str, name: str) -> None:
    for error in world(2).run("diffusers_parallel_jobs:under", wrapper, name, "ulysses"):
        assert error < CLOSE


@pytest.mark.parametrize(
    ("kind", "mesh", "calls"), [("flux", Mesh((2,)), 12), ("sd3", Mesh((2,), ("cfg",), "cfg"), 0)]
)
def test_three_steps_of_a_pipeline_and_back_to_one_rank(kind: str, mesh: Mesh, calls: int) -> None:
    for parallel, again, counted in world(2).run("diffusers_parallel_jobs:pipeline", kind, mesh):
        assert max(parallel, again) < CLOSE
        assert counted == calls


@pytest.mark.parametrize("name", ["flux", "hunyuan_video"])
def test_bfloat16_is_as_close_as_on_one_rank(name: str) -> None:
    for ratios in world(2).run("diffusers_parallel_jobs:rounding", name, Sizes(padded=True)):
        assert max(ratios) < 1.2, ratios


MISTAKES = {
    "plan: result": r"OptionError: TokenPlan: result: expected a module among .*, got 'head'",
    "skipped": r"OptionError: skip_layers on several ranks: expected no layer 0, got \[0\]",
    "plan: layers": r"OptionError: TokenPlan: layers: expected lists of layers among .*, got 'layers'",
    "plan: every": r"OptionError: TokenPlan: every: expected names among .*, got \['rotary'\]",
    "plan: attention": r"OptionError: TokenPlan: attention: expected names of modules .*, got \['attn9'\]",
    "plan: streams": r"OptionError: TokenPlan: streams: expected those that rows counts, .*, got \['sound'\]",
    "exchanged processors": "OptionError: processor of attn: .*, got FluxAttnProcessor",
    "another backend": "OptionError: processor of attn: .*, got JointAttnProcessor2_0",
    "causal": "OptionError: attention on several ranks: expected is_causal=False, got True",
    "mask of pairs": r"ShapeError: attn_mask: expected .*, got \(1, 1, 11, 11\)",
    "unknown model": "OptionError: transformer: expected a model whose tokens are known.*, got Linear. Pass",
    "strategy": "OptionError: strategy: expected .*2 ranks, got 'hybrid",
    "batch": "OptionError: batch: expected a dimension of the mesh, of .'cp',., got 'cfg'",
    "twice": "OptionError: transformer: expected one on one rank, got one on several",
    "compiled": "OptionError: transformer: expected one that is not compiled",
    "undone twice": "OptionError: transformer: expected one on several ranks, got one on one rank",
    "copy": "OptionError: transformer: expected no copy of a parallel model, got a copy",
    "sizes": "PlanMismatchError: .*expected the same sequence of calls .*, got another one on rank 1",
    "few tokens": "ShapeError: text tokens: expected at least 2, one for each rank, got 1",
    "controls": r"ShapeError: controlnet_block_samples: expected 15 tokens .* 1, got \(2, 14, 48\)",
}


@pytest.mark.parametrize("change", MISTAKES)
def test_a_mistake_raises_on_every_rank(change: str) -> None:
    for found in world(2).run("diffusers_parallel_jobs:message", change):
        assert re.match(MISTAKES[change], found), found


@pytest.mark.parametrize("streams", [(7,), (3, 8), (4, 4, 9)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shares_are_the_whole(streams: tuple[int, ...], ranks: int) -> None:
    x = torch.arange(2 * sum(streams)).view(2, -1)
    parts = [rows_of.cut(x, 1, streams, ranks, rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts, 1).sort(1).values, x)
    sizes = [sum(rows_of.share(n, ranks, rank) for n in streams) for rank in range(ranks)]
    assert [part.shape[1] for part in parts] == sizes
    assert max(sizes) - min(sizes) <= len(streams)


@pytest.mark.parametrize("streams", [(7,), (3, 8), (64, 61)], ids=str)
@pytest.mark.parametrize(
    ("kind", "members", "groups"),
    [
        ("exchange", 1, 3),
        ("ring", 1, 3),
        ("exchange", 3, 1),
        ("exchange", 2, 2),
        ("ring", 2, 2),
        ("exchange", 1, 1),
    ],
)
def test_a_plan_is_as_large_as_compilers_are_told(
    kind: str, members: int, groups: int, streams: tuple[int, ...]
) -> None:
    like = torch.zeros(1)
    for rank in range(members * groups):
        given = kind, members, groups, rank, 4, 2, streams
        torch.library.opcheck(torch.ops.attnspan.plan_of_rows.default, (like, *given))


def test_a_model_of_ones_own() -> None:
    for found in world(2).run("diffusers_parallel_jobs:own_model"):
        assert found < CLOSE


def test_a_checkpoint_recomputes_with_the_sizes_of_its_own_call() -> None:
    for found in world(3).run("diffusers_parallel_jobs:two_calls_before_backward"):
        assert found < CLOSE


REPOSITORY = Path(__file__).parents[2]


def test_the_page_runs_on_two_ranks() -> None:
    page = (REPOSITORY / "docs" / "diffusers-parallel.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    assert world(2).run("diffusers_parallel_jobs:page", "\n".join(blocks)) == ["whole", "whole"]


def test_the_example_is_as_close_as_it_says() -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(REPOSITORY / "examples" / "diffusion_two_ranks.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(?:latents|gradients) differ by (\S+)", done.stdout)
    assert len(found) == 2
    assert max(map(float, found)) < CLOSE
