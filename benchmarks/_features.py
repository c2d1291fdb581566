"""A small model with selectable attention, mask and features, on one rank and on two."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnspan import Mask, causal, from_predicate, segments
from attnspan.kernels.cpu import counters
from attnspan.parallel import Layout
from attnspan.torch import attention
from attnspan_lab.doctor.torch import matrix
from attnspan_lab.doctor.torch.matrix import blocks_of, compared, with_features, without_raising
from attnspan_lab.zoo.step import Outcome, in_float64

__all__ = ["ATTENTIONS", "FACTORS", "MASKS", "Cell", "Example", "run_cells"]

#: Masks: "causal", "function" (causal within documents, from a function) and "spans" (the same, from ids).
MASKS: tuple[str, ...] = ("causal", "function", "spans")
#: Attentions of the example, and the masks that each one supports.
ATTENTIONS: dict[str, tuple[str, ...]] = {
    "attnspan": MASKS,
    "flex": MASKS[:2],
    "sdpa": MASKS[:1],
}
#: The values of each feature. The first value is the plain one.
FACTORS = {"mask": MASKS, **matrix.FACTORS, "ranks": ("one", "data", "context")}
_HEADS, _DIM, _VOCABULARY, _BATCH, _LENGTH, _LAYERS = 2, 32, 40, 2, 32, 2


@dataclass(frozen=True)
class Cell(matrix.Cell):
    """One combination.

    Args:
        mask: One of `MASKS`.
        ranks: "one"; "data", two ranks with parts of the batch (FSDP, or summed gradients if the whole model
            is compiled); "context", two ranks with parts of the sequence.
    """

    mask: str = "causal"
    ranks: str = "one"


def _mask(name: str, ids: Any) -> Mask:
    if name == "function":
        return from_predicate(lambda b, _, q, k: (q >= k) & (ids[b, q] == ids[b, k]))
    return causal() & segments(ids) if name == "spans" else causal()


def _attend(
    kind: str, mask: str, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, shared: Any, index: Any
) -> Tensor:
    if kind == "attnspan":
        return attention(q, k, v, mask=_mask(mask, ids) if shared is None else shared, q_index=index)
    if kind == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        del h
        return (i >= j) & (ids[b, i] == ids[b, j]) if mask == "function" else i >= j

    n = q.shape[2]
    if kind == "flex":
        blocks = create_block_mask(visible, len(q), None, n, n, device="cpu")
        return flex_attention(q, k, v, block_mask=blocks)  # type: ignore[return-value]
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    seen = seen if mask == "causal" else seen & (ids[:, None, :, None] == ids[:, None, None])
    scores: Tensor = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


class _Block(nn.Module):
    def __init__(self, kind: str, mask: str) -> None:
        super().__init__()
        self.kind, self.mask = kind, mask
        self.norm, self.qkv, self.out = nn.LayerNorm(_DIM), nn.Linear(_DIM, 3 * _DIM), nn.Linear(_DIM, _DIM)

    def forward(self, x: Tensor, ids: Tensor, shared: Any, index: Any) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3 * _HEADS, -1)).transpose(1, 2)
        q, k, v = parts.chunk(3, 1)
        out = _attend(self.kind, self.mask, q, k, v, ids, shared, index)
        projected: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return x + projected


class _Model(nn.Module):
    def __init__(self, kind: str, mask: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(_VOCABULARY, _DIM), nn.Linear(_DIM, _VOCABULARY)
        self.blocks = nn.ModuleList([_Block(kind, mask) for _ in range(_LAYERS)])

    def forward(self, tokens: Tensor, ids: Tensor, shared: Any = None, index: Any = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, ids, shared, index)
        return self.head(x)  # type: ignore[no-any-return]


class Example:
    """A trial: a model, its steps, and three batches of one shape with different documents.

    Args:
        kind: One of `ATTENTIONS`, or "written out".
        mask: One of `MASKS`.
        ranks: See `Cell`.
    """

    against = "eager float64"
    changed = "another mask"

    def __init__(self, kind: str, mask: str, ranks: str = "one") -> None:
        self.mask, self.ranks, self.model = mask, ranks, _Model(kind, mask)
        self.kernel_calls = _LAYERS if kind == "attnspan" else 0
        draw = torch.Generator().manual_seed(1)
        self.batches = [
            (
                torch.randint(_VOCABULARY, (_BATCH, _LENGTH), generator=draw),
                torch.randint(3, (_BATCH, _LENGTH), generator=draw).sort().values,
            )
            for _ in range(3)
        ]

    def outcome(self, call: Callable[..., Any], number: int) -> Outcome:
        """Run a step, and return the complete results and gradients, even if each rank has only a part."""
        ranks = self.ranks
        tokens, ids = self.batches[number]
        self.model.zero_grad(set_to_none=True)
        size = _BATCH * _LENGTH * _VOCABULARY
        weights = torch.cos(torch.arange(size, dtype=torch.float64) * 0.73).reshape(_BATCH, _LENGTH, -1)
        rank = 0 if ranks == "one" else dist.get_rank()
        if ranks == "context":
            layout = Layout.of(_mask(self.mask, ids.numpy()), q_len=_LENGTH, ranks=2, batch=_BATCH)
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
            rows = layout.shard({"tokens": tokens, "ids": ids, "weights": weights}, rank)
            plan = layout.plan(heads=(_HEADS, _HEADS)).on(mesh, rows=rows)
            out = call(rows["tokens"], rows["ids"], plan, rows["q_index"])
            weights = rows["weights"]
        else:
            part = slice(rank, rank + 1) if ranks == "data" else slice(None)
            tokens, ids, weights = tokens[part], ids[part], weights[part]
            out = call(tokens, ids)
        if out.requires_grad:
            (out * weights.to(out.dtype)).sum().backward()
        gradients = {
            name: _whole(x.grad, ranks) for name, x in self.model.named_parameters() if x.grad is not None
        }
        found = out.detach().double()
        if ranks == "context":
            found = layout.gather(found, mesh)
        elif ranks == "data":
            every = [torch.empty_like(found) for _ in range(2)]
            dist.all_gather(every, found)
            found = torch.cat(every)
        return Outcome({"0": found}, gradients)


def _whole(gradient: Tensor, ranks: str) -> Tensor:
    """Sum gradients over ranks. With FSDP they are sharded means, and without FSDP each rank has its own."""
    if isinstance(gradient, DTensor):
        return gradient.full_tensor().double() * 2
    gradient = gradient.double()
    if ranks != "one":
        dist.all_reduce(gradient)
    return gradient


def run_cells(
    cells: Iterable[Cell], attention: str = "attnspan", *, backend: str = "aot_eager"
) -> Iterator[tuple[Cell, str]]:
    """Run combinations. Return "" or the failure of each.

    A cell asserts that results and gradients are right, that no graph breaks, that another mask does not
    recompile, and that the number of kernel runs fits the checkpointing.

    Args:
        cells: Cells, in order. Cells with two ranks run together, in two processes.
        attention: One of `ATTENTIONS`.
        backend: Backend of torch.compile.
    """
    cells = list(cells)
    for cell in cells:
        if cell.ranks == "one":
            yield cell, _run(cell, attention, backend)
    shared = [x for x in cells if x.ranks != "one"]
    if shared:
        with tempfile.TemporaryDirectory(prefix="attnspan-matrix-") as folder:
            context, given = get_context("spawn"), (folder, shared, attention, backend)
            processes = [context.Process(target=_rank, args=(x, *given), daemon=True) for x in range(2)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            said = [_read(Path(folder) / f"{rank}.txt", len(shared)) for rank in range(2)]
        for cell, *found in zip(shared, *said, strict=True):
            yield cell, next(filter(None, found), "")


def _read(path: Path, count: int) -> list[str]:
    """Read a rank's result of each cell. A rank reports all cells at the end, or none."""
    return path.read_text().split("\0") if path.exists() else ["the process of a rank ended"] * count


def _rank(rank: int, folder: str, cells: list[Cell], attention: str, backend: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    said = [_run(x, attention, backend) for x in cells]
    (Path(folder) / f"{rank}.txt").write_text("\0".join(said))
    dist.destroy_process_group()


def _run(cell: Cell, attention: str, backend: str) -> str:
    """Run a cell. Return the failure, or ""."""

    def run() -> str:
        written = Example("written out", cell.mask)
        written.model.double()
        with in_float64():
            want = written.outcome(written.model, 0)
        example = Example(attention, cell.mask, cell.ranks)
        call = with_features(cell, example.model, backend)
        # The hooks of fully_shard break graphs. They are meant to run between compiled blocks.
        if cell.ranks == "data" and cell.compile != "whole":
            for part in (*blocks_of(example.model), example.model):
                fully_shard(part)
        return compared(example, call, want) or _counted(cell, example, call)

    return without_raising(run)


def _counted(cell: Cell, example: Example, call: Callable[..., Any]) -> str:
    """Compare the number of kernel runs with the cell. Return a text if it differs, or ""."""
    before = counters()["forward"]["calls"]
    example.outcome(call, 0)
    ran = int(counters()["forward"]["calls"] - before)
    wanted = example.kernel_calls * (2 if cell.checkpoint == "full" else 1)
    # A rank's own keys and fetched keys may be two calls.
    good = ran in (wanted, 2 * wanted) if cell.ranks == "context" else ran == wanted
    return "" if good or not wanted else f"the kernel ran {ran} times, not {wanted}"
