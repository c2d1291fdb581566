"""FlexAttention, which torch compiles for its GPUs: any spans, every option, O(S) memory.

The block lists are made from the ends of the spans, and the mask and the biases read tensors. A new mask is
only new data and does not recompile. FlexAttention has no backward pass on CPU, so this backend runs on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnspan.base.installed import FIRST_TRITON, lacking
from attnspan.call import Problem
from attnspan.call.biases import HIDES
from attnspan.call.dropout import mixed, philox, scale_of_kept, split_seeds, threshold
from attnspan.call.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI, Options
from attnspan.masks.bounds import Spans

#: Devices for which FlexAttention has a backward pass.
DEVICES: tuple[str, ...] = ("cuda", "xpu")
BLOCK = 128
LEAST_DIM = 16
LEAST_CAPABILITY = 70
_NONE = Options()
_WORD = 0xFFFFFFFF


def supports(problem: Problem) -> str | None:
    """Return None, or why FlexAttention cannot run the problem."""
    if problem.device not in DEVICES:
        return f"it runs on GPUs, not on {problem.device}: FlexAttention has no backward there"
    if problem.dtype not in ("float32", "bfloat16", "float16"):
        return f"it takes float32, bfloat16 and float16, not {problem.dtype}"
    if "DTensors" in problem.extras:
        return "it takes no DTensors: pass backend='triton', or each rank's part by to_local()"
    if 0 in (problem.batch, problem.q_len, problem.k_len, problem.head_dim, problem.v_dim):
        return "it takes no empty arrays"
    if problem.capability is not None and problem.capability < LEAST_CAPABILITY:
        return _too_old(problem.capability)
    return lacking("triton", FIRST_TRITON) if problem.device == "cuda" else None


def _too_old(capability: int) -> str:
    return f"torch compiles for compute capability {LEAST_CAPABILITY / 10} and newer, not {capability / 10}"


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    *,
    scale: float,
    options: Options | None = None,
    lowered_for: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention, with the arguments and results of `attnspan.kernels.math.forward`.

    Outside compiled code, it compiles itself, once for each combination of options.
    """
    options = options or _NONE
    if torch.compiler.is_compiling():
        return attend(q, k, v, bounds, scale, options, lowered_for)
    kinds = options.bias_kind, options.softcap != 0, options.sinks is not None, options.dropout_p != 0
    return program(*kinds)(q, k, v, bounds, scale, options, lowered_for)  # type: ignore[no-any-return]


@cache
def program(*kinds: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """A compiled `attend` for each kind of call. One function for all would exceed a limit of torch."""
    del kinds

    def compiled(*arguments: Any) -> tuple[Tensor, Tensor]:
        return attend(*arguments)

    # The limit counts recompilations of a code object.
    compiled.__code__ = compiled.__code__.replace()
    return torch.compile(compiled, fullgraph=True)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    scale: float,
    options: Options,
    lowered_for: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Call `flex_attention`, more than once with dropout, and add sinks and illegal spans."""
    illegal = Spans._checked(bounds, k.shape[2])._illegal_rows()
    if lowered_for is not None:
        illegal = illegal | (lowered_for != k.shape[2])
    mask = block_mask(bounds, k.shape[2])
    modify = _score_mod(q, k, options)
    call = {"block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    out, lse = _flex(q, k, v, modify, call)
    if options.dropout_p:
        # Flex normalizes by the sum of the kept weights. The quotient of both sums corrects this.
        whole = _flex(q, k, v[..., :LEAST_DIM], modify, call)[1]
        kept, of_kept = _flex(q, k, v, _dropping(modify, q, k, options), call)
        share = torch.exp(of_kept - torch.where(whole == -torch.inf, 0.0, whole))
        out, lse = kept * (share * scale_of_kept(options.dropout_p))[..., None], whole
    if options.sinks is not None:
        sink = options.sinks[None, :, None].expand_as(lse)
        # For a query that sees nothing, with a sink of -inf, inf - inf would give NaN, also in gradients.
        nothing = (lse == -torch.inf) & (sink == -torch.inf)
        lse, sink = (torch.where(nothing, 0.0, x) for x in (lse, sink))
        total = torch.logaddexp(lse, sink)
        out = out * torch.exp(lse - total)[..., None]
        lse = torch.where(nothing, -torch.inf, total)
    out = torch.where(illegal[..., None], torch.nan, out).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), torch.where(illegal, torch.nan, lse)


def _flex(q: Tensor, k: Tensor, v: Tensor, modify: Any, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest
    from torch.nn.attention.flex_attention import flex_attention as flex

    wide = [torch.nn.functional.pad(x, (0, max(0, LEAST_DIM - x.shape[3]))) for x in (q, k, v)]
    out, aux = flex(*wide, score_mod=modify, return_aux=AuxRequest(lse=True), **call)  # type: ignore[call-overload]
    return out[..., : v.shape[3]], aux.lse


def block_mask(bounds: Tensor, k_len: int, *, q_block: int = BLOCK, k_block: int = BLOCK) -> Any:
    """Convert spans to FlexAttention's `BlockMask` in O(S * R + blocks) time, in eager and traced code.

    Args:
        bounds: (B|1, H|1, Sq, R, 2), int32.
        k_len: Number of keys.
        q_block, k_block: Queries and keys of a block.

    Example:
        >>> from attnspan import causal
        >>> block_mask(torch.tensor(causal().spans(256, 256).lowered.bounds), 256).kv_num_blocks.tolist()
        [[[1, 1]]]
    """
    from torch.nn.attention.flex_attention import BlockMask

    pairs = Spans._checked(bounds, k_len).block_pairs(q_block, k_block)
    # As in torch, a block that extends beyond the last query or key is a partial block.
    full = pairs == q_block * k_block
    return BlockMask.from_kv_blocks(
        *_lists((pairs > 0) & ~full),
        *_lists(full),
        BLOCK_SIZE=(q_block, k_block),
        mask_mod=_mask_mod(bounds),
        seq_lengths=(bounds.shape[2], k_len),
    )


def _lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Number of chosen blocks in each row (B, H, q blocks), and a list with these blocks first, ascending."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _mask_mod(bounds: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    lo, hi = (x.contiguous() for x in bounds.unbind(-1))
    batch, heads, _, runs = lo.shape
    by_batch, by_head = batch != 1, heads != 1

    def in_spans(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        b, h = b if by_batch else 0, h if by_head else 0  # type: ignore[assignment]
        visible = (k >= lo[b, h, q, 0]) & (k < hi[b, h, q, 0])
        for r in range(1, runs):
            visible = visible | ((k >= lo[b, h, q, r]) & (k < hi[b, h, q, r]))
        return visible

    return in_spans


def _positions(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Global indices of queries (B|1, Sq) and keys (B|1, Sk), int32."""
    q_index, k_index = options.q_index, options.k_index
    if q_index is None:
        q_index = (torch.arange(q.shape[2], device=q.device) + (k.shape[2] - q.shape[2])).to(torch.int32)[
            None
        ]
    if k_index is None:
        k_index = torch.arange(k.shape[2], device=q.device, dtype=torch.int32)[None]
    return q_index, k_index


def _score_mod(q: Tensor, k: Tensor, options: Options) -> Callable[..., Tensor] | None:
    """Make the function of softcap and bias for one score, or None without either."""
    kind = options.bias_kind
    bias: Any = options.bias
    if not kind and not options.softcap:
        return None
    capped = options.softcap != 0
    # A tensor, because FlexAttention cannot compile a number that is a symbol.
    cap = torch.full((), options.softcap, device=q.device, dtype=torch.float32)
    q_index, k_index = _positions(q, k, options)
    q_rows, k_rows = q_index.shape[0] != 1, k_index.shape[0] != 1
    b_rows, b_heads, b_queries = (
        (n != 1 for n in (*bias.shape, 1, 1)[:3]) if bias is not None else (False,) * 3
    )
    reach = bias.shape[1] // 2 if kind == DISTANCE else 0

    def modify(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        if capped:
            x = cap * torch.tanh(x / cap)
        if kind == DENSE:
            added = bias[b if b_rows else 0, h if b_heads else 0, i if b_queries else 0, j]
            return x + torch.where(added < HIDES, -torch.inf, added)
        if kind:
            distance = k_index[b if k_rows else 0, j] - q_index[b if q_rows else 0, i]
            if kind == DISTANCE:
                return x + bias[h, distance.clamp(-reach, reach) + reach]
            slope = bias[b if b_rows else 0, h]
            return x + slope * distance if kind == SIGNED_ALIBI else x - slope * distance.abs()
        return x

    assert kind in (0, ALIBI, SIGNED_ALIBI, DISTANCE, DENSE), kind
    return modify


def _dropping(
    modify: Callable[..., Tensor] | None, q: Tensor, k: Tensor, options: Options
) -> Callable[..., Tensor]:
    """Make ``modify`` with -inf for dropped pairs: `attnspan.call.dropout.kept`, pair by pair."""
    seeds, q_index, k_index = options.dropout_seed, *_positions(q, k, options)
    if seeds.dim() == 0:
        rows, heads = (torch.arange(n, device=q.device) for n in q.shape[:2])
        seeds = split_seeds(seeds, rows[:, None], heads[None])
    row = (q_index[:, None, :].to(torch.int64) + seeds[:, :, None] * 0) & _WORD
    first, second, _, _ = philox((row, 0, 0, 0), (seeds[:, :, None] & _WORD, seeds[:, :, None] >> 32 & _WORD))
    k_rows, dropped = k_index.shape[0] != 1, threshold(options.dropout_p)

    def modify_and_drop(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = k_index[b if k_rows else 0, j].to(torch.int64) & _WORD
        half = mixed(at, first[b, h, i], second[b, h, i])
        x = x if modify is None else modify(x, b, h, i, j)
        return torch.where(half >= dropped, x, -torch.inf)

    return modify_and_drop
