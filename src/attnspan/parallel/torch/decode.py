"""Decoding with a cache whose keys are spread over ranks. Keys stay on their rank, and outputs are merged.

Shapes: B batch elements, G key heads, H query heads, n new tokens, P ranks, C slots of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnspan.base.arrays import is_array
from attnspan.base.checks import count
from attnspan.errors import DeviceError, DtypeError, ShapeError, expect
from attnspan.masks import Mask, causal
from attnspan.torch import attention
from attnspan.torch._cache_rows import WritableBuffers, row_numbers
from attnspan.torch.compat import pytree

from .agreement import agreement_of, gathered
from .engine import merged
from .groups import group_of

_NONE: Mapping[str, Any] = {}


class ShardedCache(WritableBuffers):
    """KV cache of a growing sequence that is spread over the ranks of a mesh.

    A token's keys never move. New token t goes to rank t % P. After a prefill with a plan, `fill` stores this
    rank's rows in the plan's order. All batch elements have the same length. The cache is not differentiable.

    Args:
        mesh: DeviceMesh of the ranks, see `attnspan.parallel.Plan.on`.
        batch: Batch size, B.
        kv_heads: Key heads, G.
        max_len: Most tokens of the sequence.
        head_dim: Head dim of the keys.
        v_dim: Head dim of the values. None for `head_dim`.
        dtype: Dtype of the buffers, default float32.
        device: Device of the buffers.

    Attributes:
        length: Tokens so far, on all ranks together.

    Raises:
        OptionError: A size is less than 1, or the mesh does not fit.
        DtypeError: ``mesh`` is no DeviceMesh, or a size is no int.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        >>> cache = ShardedCache(init_device_mesh("cpu", (1,)), batch=1, kv_heads=2, max_len=8, head_dim=16)
        >>> q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 1, 16)
        >>> cache.attend(q, k, k).shape, cache.length
        (torch.Size([1, 4, 1, 16]), 1)
        >>> dist.destroy_process_group()
    """

    keys: Tensor
    values: Tensor
    k_index: Tensor

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        batch: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        v_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        self._mesh, self.max_len = mesh, max_len
        self.ranks, self.rank = group_of(mesh).size(), group_of(mesh).rank()
        sizes = {"batch": batch, "kv_heads": kv_heads, "max_len": max_len, "head_dim": head_dim}
        sizes["v_dim"] = head_dim if v_dim is None else v_dim
        batch, kv_heads, _, *dims = (count(name, size, least=1) for name, size in sizes.items())
        like: dict[str, Any] = {"dtype": dtype, "device": device}
        k, v = (torch.empty(batch, kv_heads, 0, dim, **like) for dim in dims)
        self._hold(k, v, torch.empty(0, dtype=torch.int64, device=device), 0)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _hold(self, k: Tensor, v: Tensor, index: Tensor, length: int) -> None:
        """Store these keys, with slots for this rank's share of the coming tokens."""
        slots = len(index) + -(-(self.max_len - length) // self.ranks)
        for name, x in (("keys", k), ("values", v)):
            buffer = x.new_zeros((*x.shape[:2], slots, x.shape[3]))
            buffer[:, :, : len(index)] = x
            self.register_buffer(name, buffer, persistent=False)
        k_index = index.new_zeros(slots)
        k_index[: len(index)] = index
        self.register_buffer("k_index", k_index, persistent=False)
        self.length, self._used = length, len(index)

    @torch.no_grad()
    def fill(self, k: Tensor, v: Tensor, q_index: Tensor, length: int) -> None:
        """Store this rank's rows of a prefill. The ranks check that each token is on one rank.

        Args:
            k: This rank's keys, shape (B, G, m, D).
            v: This rank's values, (B, G, m, Dv).
            q_index: Indices of the rows in the whole sequence, (1, m), -1 for padding: ``rows["q_index"]``.
            length: Tokens of the whole sequence.

        Raises:
            ShapeError: The sequence is longer than `max_len`, batch elements are partitioned one by one, or
                the ranks do not hold each token once.
            DtypeError: k or v have another dtype than the cache, or ``q_index`` is not integer.
            DeviceError: k or v are on another device than the cache.
            CommunicationError: A rank did not answer.
        """
        what, wanted = "ShardedCache.fill: q_index", "(1, rows), one order for all batch elements"
        whole = not (q_index.is_floating_point() or q_index.dtype == torch.bool)
        expect(whole, what, "integers", str(q_index.dtype), "Pass rows['q_index']", error=DtypeError)
        shared = q_index.dim() == 1 or q_index.shape[0] == 1
        remedy = "Prefill with a layout of one mask for all batch elements"
        expect(shared, what, wanted, tuple(q_index.shape), remedy, error=ShapeError)
        rows = q_index.flatten()
        self._check("fill", k, v, self.keys.shape[0], len(rows), length)
        self._agree("fill", length)
        # Bin 0 counts padding, the last bin counts indices beyond the sequence.
        mine = torch.bincount(rows.clamp(-1, length) + 1, minlength=length + 2)
        counts = self._gather(mine).sum(0)[1:]
        remedy = "Pass the rows and the q_index that one layout.shard(...) returned, and its q_len"
        once = bool((counts[:-1] == 1).all() and counts[-1] == 0)
        got = f"{int(counts.sum())} of them in all"
        expect(once, what, f"each of the {length} tokens on one rank", got, remedy, error=ShapeError)
        seen = rows >= 0
        self._hold(k[:, :, seen], v[:, :, seen], rows[seen], length)

    def reset(self) -> None:
        """Empty the cache. You cannot empty single batch elements, because all have the same length."""
        self._hold(self.keys[:, :, :0], self.values[:, :, :0], self.k_index[:0], 0)

    @torch.no_grad()
    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Replace batch element ``b`` with batch element ``rows[b]``, for beam search.

        Args:
            rows: Indices of batch elements, an integer tensor (B,) or a list. Pass the same on all ranks, for
                the whole batch also with ``split_batch``.

        Raises:
            ValueError: A shape, a device or, on CPU, an index does not fit.
            TypeError: ``rows`` is not integer.
            PlanMismatchError: ``rows`` differ between ranks.
        """
        numbers, _ = row_numbers("ShardedCache.reorder: rows", rows, self.keys, whole=True)
        self._agree("reorder", len(numbers), values={"order of batch elements": numbers})
        moved = [(x, x.index_select(0, numbers)) for x in (self.keys, self.values)]
        for x, new in moved:
            x.copy_(new)

    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        split_batch: bool = False,
        sinks: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        bias: Any = None,
    ) -> Tensor:
        """Append n new tokens, and attend with their queries to the keys of all ranks.

        After an error the tokens are not appended.

        Args:
            q: Queries of the new tokens, (B, H, n, D), the same on all ranks. With ``split_batch``, this
                rank's B / P batch elements, in the order of the ranks.
            k: Keys of the new tokens, (B, G, n, D), split like q.
            v: Values of the new tokens, (B, G, n, Dv), split like q.
            mask: Mask that is combined with ``causal()``, such as ``window(4095)``. Its arrays must cover all
                tokens.
            split_batch: Whether ranks hold different batch elements.
            sinks, scale, softcap, bias: See `attnspan.torch.attention`.

        Returns:
            Output for q, split like q. The partial results are merged by lse in float32, in the order of the
            ranks.

        Raises:
            ShapeError: The sequence becomes longer than `max_len`, or shapes do not fit the cache.
            DtypeError: k or v have another dtype than the cache.
            DeviceError: k or v are on another device than the cache.
            PlanMismatchError: Calls, masks or options differ between ranks.
            CommunicationError: A rank did not answer.
        """
        batch, new = self.keys.shape[0] // (self.ranks if split_batch else 1), q.shape[2]
        self._check("attend", k, v, batch, new, self.length + new)
        if sinks is not None:
            fits, remedy = sinks.shape == q.shape[1:2], "Pass one for each query head"
            expect(fits, "sinks", "({},)", tuple(sinks.shape), remedy, q.shape[1], error=ShapeError)
        seen = causal() if mask is None else causal() & mask
        facts = {"scale": scale, "softcap": softcap, "bias": repr(bias), "mask of the cache": repr(seen)}
        compared = {"sinks": sinks, "bias": bias, "mask of the cache": seen}
        self._agree("attend", (*q.shape, split_batch, self.length), facts, compared)
        if split_batch:
            q, k, v = (self._gather(x).flatten(0, 1) for x in (q, k, v))
        tokens = torch.arange(self.length, self.length + new, device=q.device)
        mine = slice((self.rank - self.length) % self.ranks, None, self.ranks)
        used = self._used + len(tokens[mine])
        for held, x in ((self.keys, k), (self.values, v), (self.k_index[None, None], tokens[None, None])):
            held[:, :, self._used : used] = x[:, :, mine]
        options: Any = {"scale": scale, "softcap": softcap, "bias": bias, "q_index": tokens}
        options["k_index"] = self.k_index[:used]
        keys, values = self.keys[:, :, :used], self.values[:, :, :used]
        out, lse = attention(q, keys, values, mask=seen, return_lse=True, **options)
        outs, lses = self._gather(out.to(torch.promote_types(out.dtype, torch.float32))), self._gather(lse)
        found = merged(outs, lses, sinks).to(out.dtype)
        self.length, self._used = self.length + new, used
        return found.chunk(self.ranks)[self.rank] if split_batch else found

    def _check(self, what: str, k: Tensor, v: Tensor, batch: int, rows: int, length: int) -> None:
        for name, x, held in (("k", k, self.keys), ("v", v, self.values)):
            sizes, remedy = (batch, held.shape[1], rows, held.shape[3]), "Make the cache for these sizes"
            where = f"ShardedCache.{what}: {name}"
            expect(x.shape == sizes, where, "{}", tuple(x.shape), remedy, sizes, error=ShapeError)
            fits, move = x.device == held.device, "Move it, or the cache"
            expect(fits, where, f"device {held.device}", str(x.device), move, error=DeviceError)
            fits = x.dtype == held.dtype
            expect(fits, where, str(held.dtype), str(x.dtype), "Convert it, or the cache", error=DtypeError)
        remedy, wanted = "Make the cache with a larger max_len", f"at most {self.max_len} tokens"
        expect(length <= self.max_len, f"ShardedCache.{what}", wanted, length, remedy, error=ShapeError)

    def _agree(
        self, call: str, shape: Any, facts: Mapping[str, object] = _NONE, values: Mapping[str, Any] = _NONE
    ) -> None:
        """Compare a call, and the tensors in its options, between ranks."""
        leaves = {
            name: [torch.as_tensor(x) for x in pytree.tree_leaves(given) if is_array(x)]
            for name, given in values.items()
        }
        facts = {"call": f"{call} of a cache", "shape": shape, **facts}
        agreement_of(group_of(self._mesh)).note(facts, leaves)

    def _gather(self, x: Tensor) -> Tensor:
        return gathered(x, group_of(self._mesh), "decoding")
