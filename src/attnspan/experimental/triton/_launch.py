"""Grids, strides and block sizes of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnspan.call.dropout import scale_of_kept, split_seeds, threshold
from attnspan.call.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI, Options

from ._backward import (
    bias_gradients_kernel,
    delta_kernel,
    key_gradients_kernel,
    query_gradients_kernel,
)
from ._config import Config, config_of
from ._forward import forward_kernel, merge_kernel
from ._interpret import interpret
from ._ranges import key_ranges_kernel, order_kernel, row_ranges_kernel


def _config(kernel: str, q: Tensor, k: Tensor, v: Tensor, given: _OptionArrays) -> Config:
    """The configuration for a call."""
    at = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 0)
    rows, dim = q.shape[2] * (q.shape[1] // k.shape[1]), max(q.shape[3], v.shape[3])
    return config_of(kernel, q.dtype, dim, rows, 10 * at[0] + at[1], given.is_heavy)


def _block(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _strides(x: Tensor, count: int = 3) -> tuple[int, ...]:
    """Strides. A dim of one element has stride 0, so that it broadcasts."""
    return tuple(0 if n == 1 else s for n, s in zip(x.shape[:count], x.stride()[:count], strict=True))


def _precision(dtype: torch.dtype) -> str:
    """The precision of products: TF32 only if torch is set to use it."""
    if interpret.get() and dtype == torch.bfloat16:
        return "widened"
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


@dataclass(frozen=True)
class _OptionArrays:
    """The options in the form of kernel arguments."""

    softcap: float
    bias: Tensor | None
    kind: int
    bias_strides: tuple[int, ...]
    reach: int
    sinks: Tensor | None
    seeds: Tensor | None
    threshold: int
    kept_scale: float
    q_index: Tensor | None
    k_index: Tensor | None

    @classmethod
    def of(cls, options: Options | None, q: Tensor) -> _OptionArrays:
        options = options or Options()
        bias, seeds, p = options.bias, options.dropout_seed, options.dropout_p
        strides: tuple[int, ...] = (0, 0, 0)
        if bias is not None:
            if options.bias_kind in (ALIBI, SIGNED_ALIBI):
                strides = (*_strides(bias, 2), 0)
            else:
                strides = _strides(bias) if options.bias_kind == DENSE else (0, bias.stride(0), 0)
        reach = bias.shape[1] // 2 if bias is not None and options.bias_kind == DISTANCE else 0
        if seeds is not None and seeds.dim() == 0:
            rows, heads = (torch.arange(n, device=q.device) for n in q.shape[:2])
            seeds = split_seeds(seeds, rows[:, None], heads[None])
        return cls(
            softcap=options.softcap,
            bias=bias,
            kind=options.bias_kind,
            bias_strides=strides,
            reach=reach,
            sinks=options.sinks,
            seeds=None if seeds is None or not p else seeds.contiguous(),
            threshold=threshold(p) if p else 0,
            kept_scale=scale_of_kept(p) if p else 1.0,
            q_index=options.q_index,
            k_index=options.k_index,
        )

    @property
    def is_heavy(self) -> bool:
        """Whether a kernel holds more than the score for each pair, as with a bias or dropout."""
        return self.kind != 0 or self.seeds is not None

    def numbers(self, scale: float) -> dict[str, Any]:
        return {
            "scale": scale,
            "softcap": self.softcap,
            "threshold": self.threshold,
            "kept_scale": self.kept_scale,
            "reach": self.reach,
            "seeds": self.seeds,
            "bias": self.bias,
            "q_index": self.q_index,
            "k_index": self.k_index,
            **dict(zip(("bias_b", "bias_h", "bias_s"), self.bias_strides, strict=True)),
            "q_index_b": 0 if self.q_index is None else _strides(self.q_index, 1)[0],
            "k_index_b": 0 if self.k_index is None else _strides(self.k_index, 1)[0],
            "SOFTCAP": self.softcap != 0.0,
            "BIAS": self.kind,
            "DROPOUT": self.seeds is not None,
            "Q_INDEX": self.q_index is not None,
            "K_INDEX": self.k_index is not None,
        }


def row_ranges(
    bounds: Tensor, k_len: int, *, kv_heads: int, group: int, block: int
) -> tuple[Tensor, int, int]:
    """Compute the ranges of keys that each block of rows sees: int32 (B|1, Hkv|1, blocks, R, 4).

    `_ranges` explains the numbers.

    Returns:
        The ranges, and their strides in planes between batch elements and key heads.
    """
    batch, heads, q_len, runs, _ = bounds.shape
    planes = kv_heads if heads > 1 else 1
    blocks = triton.cdiv(q_len * group, block)
    ranges = bounds.new_empty((batch, planes, blocks, runs, 4))
    row_ranges_kernel[(batch * planes * blocks,)](
        bounds, ranges, q_len, k_len, runs, blocks, planes, *_strides(bounds, 2), GROUP=group, BLOCK=block
    )
    return ranges, 0 if batch == 1 else planes, 0 if planes == 1 else 1


def _sizes(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, block: int, k_len: int | None = None
) -> dict[str, Any]:
    """Sizes of a call, which all kernels take."""
    group, dim, v_dim = q.shape[1] // k.shape[1], q.shape[3], v.shape[3]
    k_len = k.shape[2] if k_len is None else k_len
    ranges, by_batch, by_head = row_ranges(bounds, k_len, kv_heads=k.shape[1], group=group, block=block)
    found: dict[str, Any] = {"q": q, "k": k, "v": v, "bounds": bounds, "ranges": ranges}
    for name, x, axes in (("q", q, "bhs"), ("k", k, "bhs"), ("v", v, "bhs"), ("bounds", bounds, "bh")):
        found |= {f"{name}_{a}": s for a, s in zip(axes, _strides(x, len(axes)), strict=True)}
    return found | {
        "ranges_b": by_batch,
        "ranges_h": by_head,
        "q_len": q.shape[2],
        "k_len": k_len,
        "runs": bounds.shape[3],
        "blocks": ranges.shape[2],
        "kv_heads": k.shape[1],
        "GROUP": group,
        "D": dim,
        "DV": v_dim,
        "BLOCK_D": _block(dim),
        "BLOCK_DV": _block(v_dim),
        "PRECISION": _precision(q.dtype),
    }


def _described(x: Tensor, config: Config) -> TensorDescriptor | None:
    """Descriptor of keys or values for a GPU's copy engine, or None if it is unused or cannot read them."""
    size = x.element_size()
    fits = x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:3])
    if not config.descriptors or not fits or 0 in x.stride():
        return None
    block = [1, 1, config.block_n, _block(x.shape[3])]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def _has_waves(programs: int, device: torch.device) -> bool:
    """Whether there are more programs than the GPU runs at once, so that their order matters."""
    return device.type == "cuda" and programs > 2 * _cores(device)


def _cores(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _order(ranges: Tensor, runs: int, blocks: int, programs: int) -> Tensor | None:
    """The order in which the blocks of each plane start. None means the last blocks first."""
    if not _has_waves(programs, ranges.device):
        return None
    planes = ranges.numel() // max(blocks * runs * 4, 1)
    order = ranges.new_empty((planes, blocks))
    order_kernel[(planes * blocks,)](ranges, order, blocks, runs, CHUNK=128)
    return order


def _parts(programs: int, k_len: int, device: torch.device) -> int:
    """Number of parts of the keys of a block of rows, so that few blocks use the whole GPU."""
    if device.type != "cuda":
        return 1
    wanted = min(2 * _cores(device) // max(programs, 1), k_len // 512, 64)
    return max(1, wanted)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    options: Options | None = None,
    config: Config | None = None,
    parts: int | None = None,
    table: Tensor | None = None,
    **_: Any,
) -> None:
    """See `attnspan.experimental.triton.forward`.

    Args:
        table: int32 (B, n), the pages of each batch element. k and v are then pages, (pages, Hkv, page, D),
            with equal strides between rows. Entries for keys that no query sees may have any number.
        config: Block sizes. None uses `config_of`.
        parts: Number of parts that the keys are split into. None uses as many as fill the GPU.
    """
    batch, q_heads, q_len, v_dim = out.shape
    if out.shape[0] * out.shape[1] * out.shape[2] == 0:
        return
    group = q_heads // k.shape[1]
    given = _OptionArrays.of(options, q)
    config = config or _config("forward", q, k, v, given)
    if scale <= 0:  # the kernel assumes that the largest product of a row gives its largest score
        q, scale = (-q, -scale) if scale < 0 else (q * scale, 1.0)
    programs = batch * k.shape[1] * triton.cdiv(q_len * group, config.block_m)
    k_len = k.shape[2] if table is None else table.shape[1] * k.shape[2]
    parts = parts or _parts(programs, k_len, q.device)
    numbers = _sizes(q, k, v, bounds, config.block_m, k_len) | given.numbers(scale) | config.launch()
    described = [_described(x, config) if table is None else None for x in (k, v)]
    paged: dict[str, Any] = {"table": table, "table_b": 0, "pages": k.shape[0], "step": 0, "PAGE": 0}
    if table is not None:
        paged |= {"table_b": table.stride(0), "PAGE": k.shape[2], "step": k.stride(0) // k.stride(2)}
        assert all(x.stride(0) == paged["step"] * x.stride(2) for x in (k, v)), "pages in steps of rows"
        numbers |= {"k_b": 0, "v_b": 0}
    to, to_lse = out, lse
    if parts > 1:
        to = q.new_empty((parts, batch, q_heads, q_len, v_dim), dtype=torch.float32)
        to_lse = q.new_empty((parts, batch, q_heads, q_len), dtype=torch.float32)
    strides = dict(zip(("out_b", "out_h", "out_s"), to.stride()[-4:-1], strict=True))
    forward_kernel[(programs, parts)](
        out=to,
        lse=to_lse,
        sinks=given.sinks,
        out_part=to.stride(0),
        lse_part=to_lse.stride(0),
        lse_b=q_heads * q_len,
        lse_h=q_len,
        PARTS=parts,
        SINKS=given.sinks is not None and parts == 1,
        described_k=described[0],
        described_v=described[1],
        SPECIALIZED=bool(config.specialized),
        order=_order(numbers["ranges"], bounds.shape[3], numbers["blocks"], programs),
        **paged,
        **numbers,
        **strides,
    )
    if parts > 1:
        rows = batch * q_heads * q_len
        merge_kernel[(rows,)](
            to,
            to_lse,
            out,
            lse,
            given.sinks,
            q_len,
            q_heads,
            *out.stride()[:3],
            rows,
            DV=v_dim,
            BLOCK_DV=_block(v_dim),
            PARTS=parts,
            BLOCK_P=1 << (parts - 1).bit_length(),
            SINKS=given.sinks is not None,
        )


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    scale: float,
    options: Options | None = None,
    dbias: Tensor | None = None,
    dsinks: Tensor | None = None,
    configs: Mapping[str, Config] | None = None,
    **_: Any,
) -> None:
    """See `attnspan.experimental.triton.backward`.

    Args:
        configs: Block sizes of "queries" and "keys". Missing entries use `config_of`.
    """
    batch, q_heads, q_len = out.shape[:3]
    if batch * q_heads * q_len == 0 or k.shape[2] == 0:
        for x in (dq, dk, dv, dbias, dsinks):
            if x is not None:
                x.zero_()
        if dsinks is not None and batch * q_heads * q_len:
            _sink_gradients(dsinks, lse, _delta(dout, dlse, out), options)
        return
    k_len, given, delta = k.shape[2], _OptionArrays.of(options, q), _delta(dout, dlse, out)
    common = given.numbers(scale) | {"dout": dout, "lse": lse, "delta": delta}
    common |= dict(zip(("dout_b", "dout_h", "dout_s"), _strides(dout), strict=True))
    configs = configs or {}
    config = configs.get("queries") or _config("queries", q, k, v, given)
    numbers = _sizes(q, k, v, bounds, config.block_m) | common | config.launch()
    want = dbias is not None and given.kind in (ALIBI, SIGNED_ALIBI, DISTANCE)
    sums = q.new_zeros((2, batch, q_heads, q_len), dtype=torch.float32) if want else None
    width = 2 * given.reach + 1
    by_distance = want and given.kind == DISTANCE
    band = q.new_zeros((batch, q_heads, q_len, width), dtype=torch.float32) if by_distance else None
    programs = batch * k.shape[1] * numbers["blocks"]
    query_gradients_kernel[(programs,)](
        dq=dq,
        order=_order(numbers["ranges"], bounds.shape[3], numbers["blocks"], programs),
        row_sums=sums,
        band=band,
        WANT_BIAS=want,
        **numbers,
        **dict(zip(("dq_b", "dq_h", "dq_s"), dq.stride()[:3], strict=True)),
    )
    config = configs.get("keys") or _config("keys", q, k, v, given)
    numbers = _sizes(q, k, v, bounds, config.block_m) | common | config.launch()
    ranges, key_blocks = numbers["ranges"], triton.cdiv(k_len, config.block_n)
    planes = ranges.shape[0] * ranges.shape[1]
    key_ranges = ranges.new_empty((planes, key_blocks, 4))
    key_ranges_kernel[(planes * key_blocks,)](
        ranges, key_ranges, numbers["blocks"], bounds.shape[3], key_blocks, BLOCK=config.block_n, CHUNK=128
    )
    programs = batch * k.shape[1] * key_blocks
    key_gradients_kernel[(programs,)](
        key_ranges=key_ranges,
        order=_order(key_ranges, 1, key_blocks, programs),
        dk=dk,
        dv=dv,
        key_blocks=key_blocks,
        **numbers,
        **dict(zip(("dk_b", "dk_h", "dk_s"), dk.stride()[:3], strict=True)),
        **dict(zip(("dv_b", "dv_h", "dv_s"), dv.stride()[:3], strict=True)),
    )
    if dsinks is not None:
        _sink_gradients(dsinks, lse, delta, options)
    if dbias is None:
        return
    if given.kind == DENSE:
        _dense_gradients(dbias, numbers, key_blocks, config)
    elif given.kind == DISTANCE:
        assert sums is not None
        assert band is not None
        dbias.copy_(band.sum((0, 2)))
        dbias[:, 0] += sums[0].sum((0, 2))
        dbias[:, -1] += sums[1].sum((0, 2))
    else:
        assert sums is not None
        dbias.copy_(sums[0].sum(-1).sum_to_size(dbias.shape))


def _delta(dout: Tensor, dlse: Tensor | None, out: Tensor) -> Tensor:
    batch, heads, q_len, v_dim = out.shape
    delta = out.new_empty((batch, heads, q_len), dtype=torch.float32)
    block = 64
    delta_kernel[(batch * heads * triton.cdiv(q_len, block),)](
        dout,
        out,
        None if dlse is None else dlse.contiguous(),
        delta,
        q_len,
        heads,
        *_strides(dout),
        *_strides(out),
        DV=v_dim,
        BLOCK_DV=_block(v_dim),
        BLOCK=block,
        DLSE=dlse is not None,
    )
    return delta


def _sink_gradients(dsinks: Tensor, lse: Tensor, delta: Tensor, options: Options | None) -> None:
    """Gradients of sinks. A sink has a weight and no value, so its gradient is -delta times the weight."""
    assert options is not None
    weighted = torch.exp(options.sinks[None, :, None] - lse) * delta
    # lse is -inf if a row sees nothing and its sink is -inf. The weight is then 0, for any delta.
    dsinks.copy_(-torch.where(lse == -torch.inf, 0.0, weighted).sum((0, 2)))


def _dense_gradients(dbias: Tensor, numbers: dict[str, Any], key_blocks: int, config: Config) -> None:
    q = numbers["q"]
    batch, q_heads, q_len, _ = q.shape
    of_batch, of_heads = batch // dbias.shape[0], q_heads // dbias.shape[1]
    all_blocks, one_row = triton.cdiv(q_len, config.block_m), dbias.shape[2] == 1
    row_blocks = 1 if one_row else all_blocks
    left_out = ("ranges", "ranges_b", "ranges_h", "blocks", "kv_heads")
    bias_gradients_kernel[(dbias.shape[0] * dbias.shape[1] * row_blocks * key_blocks,)](
        dbias=dbias,
        q_heads=q_heads,
        of_batch=of_batch,
        of_heads=of_heads,
        of_blocks=all_blocks if one_row else 1,
        row_blocks=row_blocks,
        key_blocks=key_blocks,
        ONE_ROW=one_row,
        **{name: x for name, x in numbers.items() if name not in left_out},
        **dict(zip(("dbias_b", "dbias_h", "dbias_s"), _strides(dbias), strict=True)),
    )
