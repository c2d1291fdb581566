"""Compiled programs meet new batch sizes and lengths: few compilations, one with marked axes, exports."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import everything
from overflows import within_range
from samples.lengths import CALLS, DIM, HEADS, KV_HEADS, MASKS, PROBLEMS, Call, Sample, Sizes
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config
from torch.export import Dim
from torch.utils._pytree import tree_leaves

import attnspan
from attnspan.torch import attention

# Dynamo itself makes an instance of each autograd function that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

NOT_MASKS = {"Interval", "Lowering", "Mask", "Prepared", "Rows", "Spans"}
NOT_MASKS |= {"SpansLargerThanMask", "names", "register_pytrees"}
ORDERS = {"morton_order", "strided_order", "tile_order"}


class Lowered:
    """Lowers a mask, as `attention` does; one that needs values is lowered outside, and given to it."""

    def __init__(self, sample: Sample) -> None:
        self.sample, self.name, self.multiple = sample, sample.name, sample.multiple

    def __call__(self, q: Tensor, k: Tensor, *arrays: Any) -> Any:
        if self.sample.outside:
            return attention(q, k, k, mask=attnspan.spans(arrays[0]))
        mask = self.sample.build(k.shape[2], *arrays)
        placed = mask.spans(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1], like=q)
        return placed.lowered.bounds

    def inputs(self, s: Sizes) -> tuple[Any, ...]:
        sample = self.sample
        s = s if sample.batch is None else replace(s, batch=sample.batch)
        keys = sample.keys(s)
        q = torch.randn(s.batch, HEADS, sample.rows(keys), DIM)
        k = torch.randn(s.batch, KV_HEADS, keys, DIM)
        if not sample.outside:
            return q, k, *sample.arrays(s)
        mask = sample.build(keys, *sample.arrays(s)).prepare(q.shape[2], keys, like=q)
        return q, k, torch.as_tensor(mask.lowered.bounds)


Program = Lowered | Call
# Those that are prepared outside have sizes of their own, and come in a group of their own.
PROGRAMS: tuple[Program, ...] = (*map(Lowered, sorted(MASKS, key=lambda x: bool(x.outside))), *CALLS)
MARKED = EXPORTED = PROGRAMS
if not everything():
    # A ninth of the library's classes, segments, masks of two arrays, and indices, layouts and biases
    # meet sizes that are symbols. test_compile.py has lengths that the compiler learns, with each option;
    # test_export_masks.py exports segments.
    compositions = {"prefix_lm", "global_sliding", "block_causal", "sasa", "tiled_natten", "morton_natten"}
    calls = {"q_index", "layout thd", "dense bias, key_padding", "prefix, documents", "segments"}
    classes = {x.function: x.name for x in MASKS if x.function in attnspan.library.__all__ and not x.outside}
    kinds = sorted(name for function, name in classes.items() if function not in compositions)
    names = {*kinds[::9], *calls}
    MARKED = tuple(x for x in PROGRAMS if x.name in names)
    EXPORTED = tuple(x for x in PROGRAMS if x.name == "natten")


class Several(nn.Module):
    """Several in one program, as each compilation has a cost of its own."""

    def __init__(self, programs: Sequence[Program]) -> None:
        super().__init__()
        self.programs = tuple(programs)

    def forward(self, inputs: list[Any]) -> list[Any]:
        return [program(*given) for program, given in zip(self.programs, inputs, strict=True)]

    def inputs(self, s: Sizes) -> list[Any]:
        torch.manual_seed(s.length)
        return [program.inputs(s) for program in self.programs]

    def check(self, compiled: Any, given: list[Any]) -> None:
        for program, got, wanted in zip(self.programs, compiled(given), self(given), strict=True):
            torch.testing.assert_close(got, wanted, msg=lambda text, name=program.name: f"{name}: {text}")


def _groups(programs: Sequence[Program], size: int = 6) -> Any:
    programs = list(programs)
    groups = [programs[i : i + size] for i in range(0, len(programs), size)]
    return pytest.mark.parametrize("group", groups, ids=lambda g: f"{g[0].name} to {g[-1].name}")


def _varying(inputs: Any, others: Any) -> list[tuple[Tensor, dict[int, tuple[int, int]]]]:
    """Each tensor of the inputs with its axes of another size in other inputs, and both sizes."""
    pairs = zip(tree_leaves(inputs), tree_leaves(others), strict=True)
    return [
        (x, {d: (x.shape[d], y.shape[d]) for d in range(x.dim()) if x.shape[d] != y.shape[d]})
        for x, y in pairs
        if isinstance(x, Tensor)
    ]


def _count(module: Several, problems: Sequence[Sizes], marked: bool, backend: Any = within_range) -> int:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    axes = [dims for _, dims in _varying(*(module.inputs(s) for s in PROBLEMS[:2]))]
    for problem in problems:
        inputs = module.inputs(problem)
        tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        for x, dims in zip(tensors, axes, strict=True):
            for dim in dims if marked else ():
                torch._dynamo.mark_dynamic(x, dim)
        module.check(compiled, inputs)
    return counter.frame_count


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("lanes", [None, 1])
@_groups(PROGRAMS)
def test_generated_code_is_eager_code(group: Sequence[Program], lanes: int | None) -> None:
    with inductor_config.patch({"cpp.simdlen": lanes}):
        assert _count(Several(group), PROBLEMS, marked=False, backend="inductor") <= 4


@pytest.mark.slow
@_groups(MARKED)
def test_one_compilation_where_axes_are_marked(group: Sequence[Program]) -> None:
    # One batch row is a case of its own to the compiler, which refuses it where that axis is marked.
    problems = [s for s in PROBLEMS if s.batch > 1][: None if everything() else 2]
    assert _count(Several(group), problems, marked=True) == 1


@pytest.mark.slow
@pytest.mark.parametrize("multiple", [1, 2, 4] if everything() else [4])
def test_strict_export(multiple: int) -> None:
    module = Several([x for x in EXPORTED if x.multiple == multiple or not everything()])
    inputs, others = (module.inputs(s) for s in PROBLEMS[:2])
    shapes = dynamic_shapes(inputs, others, multiple)
    exported = torch.export.export(module, (inputs,), dynamic_shapes=shapes, strict=True).module()
    for problem in PROBLEMS[1:3]:
        module.check(exported, module.inputs(problem))


def dynamic_shapes(inputs: Any, others: Any, multiple: int = 4) -> torch.export.ShapesCollection:
    """The axes of the first problem's inputs that are of another size in the second's."""
    shapes = torch.export.ShapesCollection()
    for x, dims in _varying(inputs, others):
        if dims:
            shapes[x] = {d: _dim(sizes, multiple) for d, sizes in dims.items()}
    return shapes


def _dim(sizes: tuple[int, int], multiple: int) -> Any:
    """The axis of a program that has these sizes in the first two problems."""
    unit, parts = Dim("unit", min=4, max=1024), Dim("parts", min=2, max=1024)
    named = {
        (3, 5): Dim("batch", min=2, max=1024),
        (20, 28): multiple * unit,
        (5, 7): unit if multiple == 4 else Dim("quarter", min=2, max=1024),
        (5, 9): parts,
        (6, 10): parts + 1,
        (20, 36): 4 * parts,
    }
    return named.get(sizes) or Dim("size_{}_{}".format(*sizes), min=2, max=4096)


def test_every_mask_has_a_sample() -> None:
    public = {"parse", *attnspan.masks.__all__, *attnspan.library.__all__} - NOT_MASKS - ORDERS
    assert public == {sample.function for sample in MASKS}


@pytest.mark.slow
def test_a_single_document_is_no_case_of_its_own() -> None:
    counter = CompileCounterWithBackend("eager")

    def lower(q: Tensor, cu: Tensor) -> Tensor:
        mask = attnspan.causal() & attnspan.documents(cu)
        return mask.spans(q.shape[0], q.shape[0], like=q).bounds

    compiled = torch.compile(lower, fullgraph=True, backend=counter)
    for parts in (5, 1):
        q, cu = torch.zeros(4 * parts + 3), 4 * torch.arange(parts + 1)
        for x in (q, cu):
            torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(q, cu), lower(q, cu))
    assert counter.frame_count == 1
