"""Features in combination: mask, compiler, checkpointing, ranks; and the smallest combination that fails."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import combinations, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attnspan.kernels.cpu import counters
from attnspan_lab.doctor.compiler import CompilerLog
from attnspan_lab.doctor.example import MASKS, GivenModel, Trial
from attnspan_lab.doctor.subject import Subject
from attnspan_lab.zoo.step import Outcome, differences, in_float64

__all__ = ["FACTORS", "Cell", "all_cells", "covering", "run_cells", "smallest"]

#: The values of each feature; the first one is the plain one.
FACTORS = {
    "mask": MASKS,
    "compile": ("none", "block", "whole"),
    "checkpoint": ("none", "selective", "full"),
    "order": ("inside", "around"),
    "ranks": ("one", "data", "context"),
}
_WITHIN = 128  # roundings of the parameters' dtype: norm of the difference over the norm


@dataclass(frozen=True)
class Cell:
    """One combination.

    Args:
        mask: "causal"; "function", documents by a mask function; "spans", documents by ids; "own", of a model
            that was given.
        compile: "none", "block" (each block by itself) or "whole".
        checkpoint: "none", "selective" (attention is saved) or "full".
        order: Of the two: checkpoints "inside" compiled code, or "around" it.
        ranks: "one"; "data", two with parts of the batch (FSDP,
            or summed gradients where the whole is compiled); "context", two with parts of the
            sequence.
    """

    mask: str = "causal"
    compile: str = "none"
    checkpoint: str = "none"
    order: str = "inside"
    ranks: str = "one"

    @property
    def is_distinct(self) -> bool:
        """Whether no other cell means the same: an order needs two things that have one."""
        return self.order == "inside" or "none" not in (self.compile, self.checkpoint)

    def __str__(self) -> str:
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        shown = [f"{k} {v}" for k, v in named.items() if v != FACTORS[k][0] and v != "own"]
        return ", ".join(shown) or "plain"


def all_cells(masks: Sequence[str] = MASKS, ranks: Sequence[str] = FACTORS["ranks"]) -> list[Cell]:
    """Every combination, each once."""
    rest = (FACTORS["compile"], FACTORS["checkpoint"], FACTORS["order"])
    return [x for x in (Cell(*values) for values in product(masks, *rest, ranks)) if x.is_distinct]


def covering(cells: Iterable[Cell]) -> list[Cell]:
    """A few cells in which each pair of values that any cell has comes up."""
    cells = list(cells)
    pairs = {x: {(i, j, a, b) for (i, a), (j, b) in combinations(enumerate(_values(x)), 2)} for x in cells}
    missing, taken = set().union(*pairs.values()), []
    while missing:
        best = max(cells, key=lambda x: len(pairs[x] & missing))
        taken.append(best)
        missing -= pairs[best]
    return [x for x in cells if x in taken]


def _values(cell: Cell) -> tuple[str, ...]:
    return tuple(getattr(cell, f.name) for f in fields(cell))


def smallest(failing: Cell, fails: Callable[[Cell], bool]) -> Cell:
    """The smallest combination within a failing one that still fails, by delta debugging.

    Args:
        failing: A cell that fails.
        fails: Whether another one fails.
    """
    changed = True
    while changed:
        changed = False
        for name, values in FACTORS.items():
            plain = replace(failing, **{name: values[0]}) if getattr(failing, name) != "own" else failing
            # Without one of the two an order means nothing.
            plain = plain if plain.is_distinct else replace(plain, order="inside")
            if plain != failing and fails(plain):
                failing, changed = plain, True
    return failing


def run_cells(
    cells: Iterable[Cell],
    attention: str = "attnspan",
    *,
    backend: str = "aot_eager",
    subject: Subject | None = None,
) -> Iterator[tuple[Cell, str]]:
    """Run combinations; of each "" or what failed.

    A cell asserts results and gradients, that no graph breaks, that another mask compiles nothing again, and
    that the kernel ran as often as checkpointing says.

    Args:
        cells: In this order; those of two ranks are run together, in two processes.
        attention: Of the example model: one of `example.ATTENTIONS`.
        backend: Of torch.compile.
        subject: A model of the caller's instead; its cells have the mask "own".
    """
    cells = list(cells)
    for cell in cells:
        if cell.ranks == "one":
            yield cell, _run(cell, attention, backend, subject)
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
    """Read what a rank said of each cell; it says all at the end, or nothing."""
    return path.read_text().split("\0") if path.exists() else ["the process of a rank ended"] * count


def _rank(rank: int, folder: str, cells: list[Cell], attention: str, backend: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    said = [_run(x, attention, backend, None) for x in cells]
    (Path(folder) / f"{rank}.txt").write_text("\0".join(said))
    dist.destroy_process_group()


def _run(cell: Cell, attention: str, backend: str, subject: Subject | None) -> str:
    """Run a cell; the failure, or ""."""
    torch._dynamo.reset()
    try:
        if subject is not None:
            exact = GivenModel(subject.copy())
            return _compared(cell, GivenModel(subject.copy()), exact.outcome(exact.model, 0), backend)
        written = Trial("written out", cell.mask)
        written.model.double()
        with in_float64():
            want = written.outcome(written.model, 0)
        return _compared(cell, Trial(attention, cell.mask), want, backend)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _compared(cell: Cell, trial: Trial | GivenModel, want: Outcome, backend: str) -> str:
    blocks = [x for part in trial.model.modules() if isinstance(part, nn.ModuleList) for x in part]
    call = _with_features(cell, trial.model, blocks, backend)
    with CompilerLog() as first:
        found = trial.outcome(call, 0, cell.ranks)
    if first.breaks:
        return f"the graph breaks {len(first.breaks)} times: {first.breaks[0].what.partition(': ')[2]}"
    output, gradient = differences(found, want)
    kinds = (x.dtype for x in trial.model.parameters() if x.is_floating_point())
    if not max(output, gradient) <= _WITHIN * torch.finfo(next(kinds, torch.float32)).eps:
        return f"results are {output:.1e} away from {trial.against}, gradients {gradient:.1e}"
    with CompilerLog() as log:
        for number in range(1, len(trial.batches)):
            trial.outcome(call, number, cell.ranks)
    if log.graphs:
        reason = f": {log.recompiles[0].guard}" if log.recompiles else ""
        return f"another mask compiles {len(log.graphs)} graphs again{reason}"
    before = counters()["forward"]["calls"]
    trial.outcome(call, 0, cell.ranks)
    ran = int(counters()["forward"]["calls"] - before)
    wanted = trial.kernel_calls * (2 if cell.checkpoint == "full" else 1)
    # Own keys and those of others may be two calls.
    good = ran in (wanted, 2 * wanted) if cell.ranks == "context" else ran == wanted
    return "" if good or not wanted else f"the kernel ran {ran} times, not {wanted}"


def _with_features(cell: Cell, model: nn.Module, blocks: list[nn.Module], backend: str) -> Callable[..., Any]:
    """The model with a cell's features; blocks are changed in place."""
    whole, around = cell.compile == "whole", cell.order == "around"
    for block in blocks:
        if cell.checkpoint != "none" and not around:
            block.forward = partial(_checkpointed, block.forward, cell.checkpoint)
        if cell.compile == "block":
            block.forward = torch.compile(block.forward, backend=backend)
            if around:
                block.forward = partial(_checkpointed, block.forward, cell.checkpoint)
    # The hooks of fully_shard break graphs, and are meant to lie between compiled blocks.
    for part in (*blocks, model) if cell.ranks == "data" and not whole else ():
        fully_shard(part)
    call: Callable[..., Any] = torch.compile(model, backend=backend) if whole else model
    return partial(_checkpointed, call, cell.checkpoint) if whole and around else call


def _save_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del context, args, kwargs
    return CheckpointPolicy.MUST_SAVE if "attention" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


_CONTEXTS = partial(create_selective_checkpoint_contexts, _save_attention)


def _checkpointed(run: Callable[..., Any], kind: str, *args: Any, **kwargs: Any) -> Any:
    more: dict[str, Any] = {"context_fn": _CONTEXTS} if kind == "selective" else {}
    return checkpoint(run, *args, use_reentrant=False, **more, **kwargs)
