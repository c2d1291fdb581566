"""What every rank does for the parity tests: its share of each case, results as plain tensors."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from parity_cases import MASKS, OPTIONS, Case, inputs, parameters
from torch import Tensor
from worlds import mesh

from attnspan.parallel import ContextParallel
from attnspan.torch import SlowPathWarning


def make(case: Case, **changes: Any) -> ContextParallel:
    """The context-parallel plan of a case on this rank's world."""
    keywords: dict[str, Any] = {
        "mask": MASKS[case.mask](case),
        "q_len": case.length,
        "k_len": case.k_len,
        "heads": case.heads,
        "strategy": case.strategy,
        "batch": case.batch,
        "method": case.partition,
        "rows_per_chunk": case.rows_per_chunk,
        "head_dim": case.dims[0],
        "dtype": getattr(torch, case.dtype),
    }
    return ContextParallel(mesh(dist.get_world_size())["cp"], **{**keywords, **changes})


def local_inputs(cp: ContextParallel, case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's q, k, v (leaves, in the case's layout) and gradients of out and lse."""
    whole = inputs(case)
    shard_keys = cp.shard if case.k_len is None else cp.shard_keys
    qkv = [cp.shard(whole.q, dim=2), shard_keys(whole.k, dim=2), shard_keys(whole.v, dim=2)]
    gradients = [cp.shard(whole.dout, dim=2), cp.shard(whole.dlse, dim=2)]
    if case.layout == "bshd":
        qkv, gradients[0] = [x.transpose(1, 2) for x in qkv], gradients[0].transpose(1, 2)
    return [x.detach().requires_grad_() for x in qkv], gradients


def attend(cp: ContextParallel, case: Case) -> dict[str, Any]:
    """Forward and backward of one case: what this rank has of each result, in "bhsd"."""
    leaves, (dout, dlse) = local_inputs(cp, case)
    options = OPTIONS[case.option](case)
    extra = parameters(options)
    keywords = {**options, "layout": case.layout, "return_lse": case.return_lse}
    out = cp.attention(*leaves, **keywords)
    outs, gradients = ([out[0], out[1]], [dout, dlse]) if case.return_lse else ([out], [dout])
    got = list(torch.autograd.grad(outs, [*leaves, *extra], gradients, allow_unused=True))
    for i, x in enumerate([*leaves, *extra]):
        got[i] = torch.zeros_like(x) if got[i] is None else got[i]
    values = [outs[0].detach(), *got[:3]]
    if case.layout == "bshd":
        values = [x.transpose(1, 2) for x in values]
    found: dict[str, Any] = dict(zip(("out", "dq", "dk", "dv"), values, strict=True))
    if case.return_lse:
        found["lse"] = outs[1].detach()
    found |= {f"parameter {i}": x for i, x in enumerate(got[3:])}
    rows = torch.where(cp.valid, cp.positions, -1)
    keys = rows if case.k_len is None else cp.shard_keys(torch.arange(case.k_len), dim=0, fill=-1)
    return {**found, "rows": rows, "keys": keys}


def attend_all(cases: list[Case]) -> list[dict[str, Any]]:
    """Forward and backward of many cases, each named if it fails."""
    found = []
    for case in cases:
        try:
            found.append(attend(make(case), case))
        except Exception as error:
            error.add_note(repr(case))
            raise
    return found


def attend_plainly(cases: list[Case]) -> list[dict[str, Any]]:
    """The same where no kernel runs and framework code takes its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)
        return attend_all(cases)


def attend_with_foreign_ids(case: Case, other: str) -> dict[str, Any]:
    """A mask whose ids lie as another partition would deal them: shapes fit, rows do not."""
    from parity_cases import segment_ids

    import attnspan

    right = make(case)
    # Where heads alone are shared out, rows are always dealt in order: the other one deals chunks.
    wrong = make(case, method=other, strategy="exchange")
    ids = segment_ids(case, case.batch)
    parts: list[Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(parts, torch.where(wrong.valid, wrong.positions, -1))
    mine: list[Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(mine, torch.where(right.valid, right.positions, -1))
    dealt, meant = torch.cat(parts), torch.cat(mine)
    mixed = torch.empty_like(ids)
    mixed[:, meant[meant >= 0]] = ids[:, dealt[dealt >= 0]]
    mask = attnspan.causal() & attnspan.segments(mixed, max_runs=case.length)
    return attend(make(case, mask=mask), case)


def twice(cases: list[Case]) -> list[str]:
    """The cases whose second run differs in a bit from the first."""
    return [
        f"{case}: {name}"
        for case in cases
        for first, second in [(attend(make(case), case), attend(make(case), case))]
        for name in first
        if not torch.equal(first[name], second[name])
    ]
