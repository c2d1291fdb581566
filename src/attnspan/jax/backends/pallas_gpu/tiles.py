"""What the kernels of the GPU share: their arguments, masked loads, and the scores of one tile.

A tile is a block of queries times a block of keys. It is stored with its queries or with its keys as rows,
whichever a kernel's products want; `Rows` and `Keys` hold vectors, and a tile spreads them as it needs.
Scores are in units of log2, so that weights are powers of two.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ...._biases import HIDES
from ....options import ALIBI, DENSE, SIGNED_ALIBI
from ...dropout import keeps
from .. import Static
from ..tiles import LOG2E, InBlocks, gradients_of_scores, scores_of_products


@dataclass(frozen=True)
class Plan(InBlocks):
    """What a kernel is compiled for; lengths in elements, blocks are powers of two from 16 on."""

    static: Static
    q_len: int
    k_len: int
    head_dim: int
    v_dim: int
    group: int  # query heads of one key head
    block_q: int
    block_k: int
    warps: int
    interpret: bool

    @property
    def has_slopes(self) -> bool:
        return self.static.bias_kind in (ALIBI, SIGNED_ALIBI)

    @property
    def width(self) -> int:
        """Columns of a tile of queries or keys: what the GPU's products take."""
        return power_of_two(self.head_dim)

    @property
    def v_width(self) -> int:
        return power_of_two(self.v_dim)


class Arrays(NamedTuple):
    """What a kernel reads, whole; arrays before it runs, references inside.

    Shapes: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), bounds as in `Operands`, visits of
    `key_visits`, q_visits of `query_visits`, words uint32 (2, B, Hq, Sq), dout (B, Hq, Sq, Dv), lse and
    common float32 (B, Hq, Sq): the lse in units of log2 (inf where a row saw nothing), and `common_of`.
    """

    q: Any
    k: Any
    v: Any
    bounds: Any
    visits: Any
    bias: Any = None
    sinks: Any = None
    words: Any = None
    q_index: Any = None
    k_index: Any = None
    q_visits: Any = None
    dout: Any = None
    lse: Any = None
    common: Any = None


class Rows(NamedTuple):
    """Vectors over the queries of a tile; `inside` is None where no block is ragged."""

    start: Any
    inside: Any
    spans: list[tuple[Any, Any]]
    index: Any
    words: Any


class Keys(NamedTuple):
    """Vectors over the keys of a tile."""

    start: Any
    number: Any
    inside: Any
    index: Any


class Tile(NamedTuple):
    """Scores of a tile: log2 units, the softcap's derivative, which pairs are visible, which are kept.

    The last three are None where they would be 1 or true throughout; `distance` is what a slope multiplies.
    """

    scores: Any
    slope: Any
    visible: Any
    keep: Any
    distance: Any


def power_of_two(n: int) -> int:
    """The least power of two from n on, and 16 at least, as products on the GPU want it."""
    return max(16, 1 << max(n - 1, 0).bit_length())


def product(a: Any, b: Any) -> Any:
    """a @ b in float32. Products of float32 are exact ones: TF32 would keep 10 bits of them."""
    return lax.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def shared(ref: Any, at: tuple[Any, Any]) -> tuple[Any, Any]:
    """Where to look along the axes for batch rows and heads, which may have one element for all."""
    # No Python number: the interpreter of masked loads knows only arrays.
    return tuple(jnp.int32(0) if size == 1 else x for size, x in zip(ref.shape, at, strict=False))  # type: ignore[return-value]


def specs(plan: Plan, arrays: Arrays) -> Arrays:
    """The block specs of a kernel's arguments: whole arrays, rounded up to tiles. Loads beyond are masked."""

    def spec(x: Any, *multiples: int) -> Any:
        if x is None:
            return None
        multiples = (1,) * (x.ndim - len(multiples)) + multiples
        block = tuple(-(-n // m) * m for n, m in zip(x.shape, multiples, strict=True))
        return pl.BlockSpec(block, lambda *_: (0,) * x.ndim)

    q, k, by_row = plan.block_q, plan.block_k, arrays.bias is not None and arrays.bias.shape[-2] != 1
    multiples: dict[str, tuple[int, ...]] = {
        "q": (q, plan.width),
        "k": (k, plan.width),
        "v": (k, plan.v_width),
        "bounds": (q, 1, 1),
        "bias": (q if by_row else 1, k) if plan.static.bias_kind == DENSE else (),
        "words": (q,),
        "q_index": (q,),
        "k_index": (k,),
        "dout": (q, plan.v_width),
        "lse": (q,),
        "common": (q,),
    }
    return Arrays(**{name: spec(x, *multiples.get(name, ())) for name, x in arrays._asdict().items()})


def load(view: Any, mask: Any, other: float = 0) -> Any:
    """What a view of a reference holds, with `other` where a mask is False; None masks nothing."""
    return triton.load(view) if mask is None else triton.load(view, mask=mask, other=other)


def both(rows: Any, columns: Any, shape: tuple[int, int]) -> Any:
    """The pairs of two vectors of bits, of which None is True throughout."""
    given = [x for x in (None if rows is None else rows[:, None], columns) if x is not None]
    if not given:
        return None
    return jnp.broadcast_to(given[0] if len(given) == 1 else given[0] & given[1], shape)


def columns_of(width: int, dim: int) -> Any:
    """Which columns of a tile the array has, (1, width); None for all."""
    return None if width == dim else (lax.iota(jnp.int32, width) < dim)[None, :]


def store(ref: Any, x: Any, inside: Any, dim: int | None = None) -> None:
    """Write rows, and columns below `dim`, that lie inside the array."""
    mask = inside if x.ndim == 1 else both(inside, columns_of(x.shape[1], dim or x.shape[1]), x.shape)
    triton.store(ref, x, mask=mask)


def loop(count: int, body: Any, carry: Any) -> Any:
    """Run `body(i, carry)` for i below `count`, with an index of 32 bits also where JAX has 64."""
    return (
        body(jnp.int32(0), carry)
        if count == 1
        else lax.fori_loop(jnp.int32(0), jnp.int32(count), body, carry)
    )


def zero_unseen(x: Any, visible: Any) -> Any:
    """Rows of `x` that nobody in the columns of the tile sees become 0: 0 * NaN would reach everybody."""
    if visible is None:
        return x
    seen = visible.astype(jnp.int32).max(0)
    return jnp.where(seen[:, None] > 0, x, jnp.zeros_like(x))


@dataclass(frozen=True)
class Reader:
    """The loads and the tiles of one batch row and one query head, at `at`."""

    plan: Plan
    arrays: Arrays
    at: tuple[Any, Any]

    @property
    def key_at(self) -> tuple[Any, Any]:
        return self.at[0], lax.div(self.at[1], jnp.int32(self.plan.group))

    def vector(self, ref: Any, at: tuple[Any, ...], part: Rows | Keys, other: float = 0) -> Any:
        """Elements of a reference's last axis for the rows or keys of a tile."""
        size = self.plan.block_q if isinstance(part, Rows) else self.plan.block_k
        return load(ref.at[(*at, pl.ds(part.start, size))], part.inside, other)

    def matrix(self, ref: Any, part: Rows | Keys, width: int, dim: int) -> Any:
        """Rows of q or dout, or of k or v, with zeros beyond their ends."""
        rows = isinstance(part, Rows)
        at, size = (self.at, self.plan.block_q) if rows else (self.key_at, self.plan.block_k)
        mask = both(part.inside, columns_of(width, dim), (size, width))
        return load(ref.at[(*at, pl.ds(part.start, size), pl.ds(0, width))], mask)

    def rows(self, block: Any) -> Rows:
        """What the tiles of a block of queries need of its rows."""
        plan, arrays, size = self.plan, self.arrays, self.plan.block_q
        start = block * size
        number = start + lax.iota(jnp.int32, size)
        inside = None if plan.q_len % size == 0 else number < plan.q_len
        bounds, at = arrays.bounds, shared(arrays.bounds, self.at)

        def edge(run: int, side: int) -> Any:
            return load(bounds.at[(*at, pl.ds(start, size), jnp.int32(run), jnp.int32(side))], inside)

        spans = [(edge(run, 0), edge(run, 1)) for run in range(bounds.shape[3])]
        rows, words = Rows(start, inside, spans, number + (plan.k_len - plan.q_len), None), None
        if arrays.q_index is not None:
            index = self.vector(arrays.q_index, shared(arrays.q_index, self.at)[:1], rows)
            rows = rows._replace(index=index)
        if arrays.words is not None:
            words = [self.vector(arrays.words, (jnp.int32(i), *self.at), rows) for i in (0, 1)]
        return rows._replace(words=words)

    def keys(self, block: Any) -> Keys:
        """What the tiles of a block of keys need of them."""
        size, index = self.plan.block_k, self.arrays.k_index
        number = block * size + lax.iota(jnp.int32, size)
        inside = None if self.plan.k_len % size == 0 else number < self.plan.k_len
        keys = Keys(block * size, number, inside, number)
        if index is None:
            return keys
        return keys._replace(index=self.vector(index, shared(index, self.at)[:1], keys))

    def of_rows(self, rows: Rows) -> tuple[Any, Any]:
        """Tiles of q and dout."""
        plan, arrays = self.plan, self.arrays
        q = self.matrix(arrays.q, rows, plan.width, plan.head_dim)
        return q, self.matrix(arrays.dout, rows, plan.v_width, plan.v_dim)

    def of_keys(self, keys: Keys) -> tuple[Any, Any]:
        """Tiles of k and v."""
        plan, arrays = self.plan, self.arrays
        k = self.matrix(arrays.k, keys, plan.width, plan.head_dim)
        return k, self.matrix(arrays.v, keys, plan.v_width, plan.v_dim)

    def scores(self, q: Any, k: Any, rows: Rows, keys: Keys, masked: bool, keys_down: bool = False) -> Tile:
        """The scores of a tile (block_q, block_k) of rows of q and k, or with ``keys_down`` of its transpose.

        Where not ``masked``, every row sees every key.
        """
        static = self.plan.static

        def by_row(x: Any) -> Any:
            return x[None, :] if keys_down else x[:, None]

        def by_key(x: Any) -> Any:
            return x[:, None] if keys_down else x[None, :]

        scores, slope = scores_of_products(product(k, q.T) if keys_down else product(q, k.T), static)
        visible = keep = distance = None
        for lo, hi in rows.spans if masked else ():
            seen = (by_key(keys.number) >= by_row(lo)) & (by_key(keys.number) < by_row(hi))
            visible = seen if visible is None else visible | seen
        if self.plan.has_slopes:
            away = (by_key(keys.index) - by_row(rows.index)).astype(jnp.float32)
            distance = away if static.bias_kind == SIGNED_ALIBI else -jnp.abs(away)
            bias = self.arrays.bias
            scores = scores + distance * (bias[shared(bias, (self.at[0],))[0], self.at[1]] * LOG2E)  # type: ignore[arg-type]
        elif static.bias_kind == DENSE:
            bias = self._dense(rows, keys)
            bias = bias.T if keys_down else bias
            # Not bias >= HIDES, which would hide a NaN.
            scores, shown = scores + bias * LOG2E, jnp.logical_not(bias < HIDES)
            visible = shown if visible is None else visible & shown
        if static.dropout_p:
            first, second = (by_row(x) for x in rows.words)
            keep = keeps(static.dropout_p, first, second, by_key(keys.index))
        return Tile(scores, slope, visible, keep, distance)

    def _dense(self, rows: Rows, keys: Keys) -> Any:
        ref, shape = self.arrays.bias, (self.plan.block_q, self.plan.block_k)
        where = shared(ref, self.at)
        if ref.shape[2] == 1:
            bias = self.vector(ref, (*where, jnp.int32(0)), keys)[None, :]
            return jnp.broadcast_to(bias.astype(jnp.float32), shape)
        view = ref.at[(*where, pl.ds(rows.start, shape[0]), pl.ds(keys.start, shape[1]))]
        columns = None if keys.inside is None else keys.inside[None, :]
        return load(view, both(rows.inside, columns, shape)).astype(jnp.float32)

    def gradients(
        self,
        operands: tuple[Any, Any, Any, Any],
        rows: Rows,
        keys: Keys,
        masked: bool,
        keys_down: bool = False,
    ) -> tuple[tuple[Any, Any, Any], Tile]:
        """What `gradients_of_scores` gives for tiles of q, k, v and dout; arguments as of `scores`."""
        q, k, v, dout = operands
        tile = self.scores(q, k, rows, keys, masked, keys_down)
        # Queries beyond the end have an infinite lse: their weights are 0, whatever they score.
        lse = self.vector(self.arrays.lse, self.at, rows, jnp.inf)
        common = self.vector(self.arrays.common, self.at, rows)
        lse, common = (x[None, :] if keys_down else x[:, None] for x in (lse, common))
        weights = jnp.exp2(tile.scores - lse)
        dweights = product(v, dout.T) if keys_down else product(dout, v.T)
        rest: Any = {"visible": tile.visible, "keep": tile.keep, "slope": tile.slope}
        return gradients_of_scores(weights, dweights, common, self.plan.static, **rest), tile
