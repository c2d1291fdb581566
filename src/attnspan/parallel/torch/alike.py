"""Comparison of a sharded step with the same step on one rank, with likely causes of differences.

Shapes: B batch elements, S rows of the whole problem, n rows of a rank, P ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnspan.errors import ShapeError, expect

from .agreement import gathered
from .groups import group_of

#: Tensors that an error lists, and then it counts them.
_SHOWN = 4
_SHIFTED = (
    "These are the {} rows of each run of neighbours that a rank holds: {} after sharding. "
    "Shift before layout.shard(...)"
)
_CAUSES = {
    "last": _SHIFTED.format("last", "labels or targets were shifted"),
    "first": _SHIFTED.format("first", "tokens, positions or features were shifted"),
    "elsewhere": "They equal other rows of the sequence: the tensors come from another layout than the "
    "marks. Shard the whole batch by one layout.shard(...) call",
    "mask": "The mask or the ids are another batch's or another layout's, positions are not "
    "rows['q_index'], or tensors hold other rows than rows['q_index']. Make layout, plan and rows from the "
    "ids of this batch",
    "mean": "The ranks' parts do not add up, probably because each rank averages over its own targets. "
    "Divide by the targets of all ranks, global_token_count(...)",
    "gradient": "Either gradients are not summed over ranks: call sum_gradients(...), or use FSDP2 with "
    "set_gradient_divide_factor(1.0). Or a rank averages over its own targets: divide by "
    "global_token_count(...)",
}


def differences(alone: dict[str, Any], sharded: dict[str, Any], mesh: Any, within: float) -> list[str]:
    """Describe tensors that differ, each in one line, the first with its cause.

    Tensors with an entry for each token come first, because a wrong loss or gradient follows from them. See
    `attnspan.testing.assert_same_as_one_rank`.
    """
    group, what, index = group_of(mesh), "step(batch, mesh)", sharded.pop("q_index", None)
    alone.pop("q_index", None)
    remedy = "Return rows['q_index'] too, and the same names with and without a mesh"
    fits = isinstance(index, Tensor) and alone.keys() == sharded.keys()
    wanted = f"q_index, {', '.join(alone)}"
    expect(fits, what, wanted, ", ".join(sharded) or "nothing", remedy)
    rows = gathered(index.reshape(-1, index.shape[-1]).long(), group, what).cpu()
    found: list[tuple[int, str, str]] = []  # order, text, cause
    for name, want in alone.items():
        want, got = (_plain(x) for x in (want, sharded[name]))
        if want.dim() == 0:
            order, text, cause = 1, _compare_sum(want, got, group, within), "mean"
        elif want.shape == got.shape:
            order, text, cause = 2, _compare_same(want, got, group, within), "gradient"
        else:
            mine = want.dim() > 1 and got.shape == (len(want), rows.shape[2], *want.shape[2:])
            wanted = f"{name} of shape ({len(want)}, {rows.shape[2]}, ...), as q_index says"
            expect(mine, what, wanted, tuple(got.shape), "Return this rank's rows of it", error=ShapeError)
            order, (text, cause) = 0, _compare_rows(want, gathered(got, group, what), rows, within)
        if text:
            found.append((order, f"{name}: {text}", cause))
    found.sort(key=lambda x: x[0])
    lines = [text for _, text, _ in found[:_SHOWN]]
    if found:
        lines[0] += f". {_CAUSES[found[0][2]]}."
    return lines + [f"{len(found) - _SHOWN} more tensors differ"] * (len(found) > _SHOWN)


def _plain(x: Any) -> Tensor:
    plain: Tensor = (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()
    return plain if plain.is_floating_point() else plain.double()


def _compare_sum(want: Tensor, got: Tensor, group: Any, within: float) -> str:
    total = got.double().clone()
    dist.all_reduce(total, group=group)
    if abs(float(total) - float(want)) <= within * abs(float(want)):
        return ""
    return f"the ranks' parts add up to {float(total):.6g}, one rank has {float(want):.6g}"


def _compare_same(want: Tensor, got: Tensor, group: Any, within: float) -> str:
    want, got = want.double(), got.double()
    mine = (got - want).norm() / want.norm().clamp_min(1e-30), (got * want).sum() / want.square().sum()
    errors = gathered(torch.stack(mine), group, "step(batch, mesh)").tolist()
    wrong = [rank for rank, (error, _) in enumerate(errors) if not error <= within]
    if not wrong:
        return ""
    worst = max(wrong, key=lambda rank: errors[rank][0])
    error, factor = errors[worst]
    return (
        f"it differs on ranks {wrong}, by up to {error:.1e} of its norm, "
        f"about {factor:.3g} times the value on one rank"
    )


def _compare_rows(want: Tensor, parts: Tensor, rows: Tensor, within: float) -> tuple[str, str]:
    """Describe the difference, and name its cause."""
    batch, length = want.shape[:2]
    want = want.reshape(batch, length, -1).double().cpu()
    got, owner = torch.full_like(want, torch.nan), torch.full((batch, length), -1)
    for rank, (part, numbers) in enumerate(zip(parts, rows, strict=True)):
        for row in range(batch):
            at = numbers[row % len(numbers)]
            got[row, at[at >= 0]] = part[row].reshape(len(at), -1).double().cpu()[at >= 0]
            owner[row, at[at >= 0]] = rank
    size = want.norm(dim=2).square().mean().sqrt().clamp_min(1e-30)
    change = torch.where(got == want, 0.0, got - want).norm(dim=2) / size
    wrong = ~(change <= within)
    if not wrong.any():
        return "", ""
    places = [(int(b), int(s)) for b, s in wrong.nonzero().tolist()]
    shown = ", ".join(map(str, places[:4])) + ", ..." * (len(places) > 4)
    owners = sorted(set(owner[wrong].tolist()))
    text = f"{len(places)} of {batch * length} rows differ, by up to {float(change[wrong].max()):.1e}"
    text += f" of their size, on ranks {owners}: (batch element, token) {shown}"
    edge = torch.ones(batch, 1, dtype=torch.bool)
    leaves = owner[:, 1:] != owner[:, :-1]
    if not (wrong & ~torch.cat([leaves, edge], 1)).any():
        return text, "last"
    if not (wrong & ~torch.cat([edge, leaves], 1)).any():
        return text, "first"
    known = all((want[b] - got[b, s]).norm(dim=1).min() <= within * size for b, s in places)
    return text, "elsewhere" if known else "mask"
