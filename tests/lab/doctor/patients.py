"""Small models, each with one planted defect, and healthy twins. The defect's line ends in ``# sick``.

A function ``sick_...`` returns the patient, ``well_...`` its twin; `KINDS` says what the doctor has to find.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attnspan import causal, key_padding, segments
from attnspan.parallel import Layout
from attnspan.torch import attention as attnspan_attention

HEADS, DIM, LENGTH, VOCABULARY = 4, 32, 24, 50

#: What is planted, by the name of the patient.
KINDS: dict[str, str] = {}
Factory = Callable[[], Any]


def sick(kind: str) -> Callable[[Factory], Factory]:
    def note(factory: Factory) -> Factory:
        KINDS[factory.__name__] = kind
        return factory

    return note


def tokens(lengths: tuple[int, ...] = (LENGTH,), batch: int = 2, **more: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(VOCABULARY, (batch, n), generator=generator)} | more for n in lengths]


def heads_of(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, attend: Callable[..., Tensor], kv_heads: int = HEADS) -> None:
        super().__init__()
        self.attend, self.kv_heads = attend, kv_heads
        self.norm = nn.LayerNorm(DIM)
        self.q, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.kv = nn.Linear(DIM, 2 * DIM * kv_heads // HEADS)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        y = self.norm(x)
        k, v = self.kv(y).chunk(2, -1)
        q, k, v = heads_of(self.q(y)), heads_of(k, self.kv_heads), heads_of(v, self.kv_heads)
        out = self.attend(q, k, v, **given)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(
        self, attend: Callable[..., Tensor], layers: int = 1, block: Any = Block, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList([block(attend, **options) for _ in range(layers)])
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, input_ids: Tensor, **given: Any) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, **given)
        return self.head(x)


CAUSAL = {"causal": True}


def attends(
    kind: str | None,
    *,
    expected: dict[str, Any] = CAUSAL,
    lengths: tuple[int, ...] = (LENGTH,),
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Callable[[Callable[..., Tensor]], Factory]:
    """Make the factory of a model whose attention is the function; without a kind it is healthy."""

    def made(attend: Callable[..., Tensor]) -> Factory:
        @wraps(attend)
        def factory() -> Any:
            return Model(attend, **options).to(dtype), tokens(lengths), expected

        return factory if kind is None else sick(kind)(factory)

    return made


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def well_fused() -> Any:
    return Model(fused), tokens((24, 40, 33)), CAUSAL


# Scores that are stored


@attends("unfused", expected={})
def sick_written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v  # sick


@attends("unfused", expected={})
def sick_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(q.shape[-1] ** -0.5)
    weights = F.dropout(F.softmax(weights, dim=-1), 0.0)  # sick
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def with_sinks(scores: Tensor, v: Tensor) -> Tensor:
    sinks = torch.zeros(HEADS, 1, 1).expand(*scores.shape[:-1], 1)
    both = torch.cat([sinks, scores], -1)
    both = both - both.max(-1, keepdim=True).values
    return F.softmax(both, -1)[..., 1:] @ v  # sick: sick_sinks, sick_future_beside_sinks


@attends("unfused")
def sick_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    later = torch.ones(q.shape[2], q.shape[2]).triu(1) * -1e9
    return with_sinks(q @ k.mT + later, v)


@attends("causality-lost")
def sick_future_beside_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first column is a sink: the diagonal above the main one is seen."""
    later = torch.ones(q.shape[2], q.shape[2]).triu(2) * -1e9
    return with_sinks(q @ k.mT + later, v)


@attends("unfused")
def sick_dropout_in_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = 0.1 * torch.is_grad_enabled()
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)  # sick


@attends("dense-mask")
def sick_dense_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()  # sick
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@sick("dense-mask")
def sick_dense_bias() -> Any:
    slopes = torch.tensor([2.0**-i for i in range(1, HEADS + 1)])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(q.shape[2])
        bias = -slopes[:, None, None] * (index[:, None] - index).abs()  # sick
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])

    return Model(attend), tokens()


def of_segments(q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor) -> Tensor:
    return attnspan_attention(q, k, v, mask=causal() & segments(segment_ids))


def well_segments() -> Any:
    ids = torch.arange(LENGTH).expand(2, -1) // 9
    return Model(of_segments), tokens(segment_ids=ids), CAUSAL


# Copies


@attends("kv-copy", kv_heads=2)
def sick_repeat_interleave(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))  # sick
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@sick("kv-copy")
def sick_repeat_kv() -> Any:
    def repeat_kv(x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, 2, s, d).reshape(b, 2 * h, s, d)  # sick

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), is_causal=True)

    return Model(attend, kv_heads=2), tokens(), CAUSAL


@attends(None, kv_heads=2)
def well_shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@attends("copy")
def sick_contiguous(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.contiguous() for x in (q, k, v))  # sick
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@attends("upcast", dtype=torch.bfloat16)
def sick_upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cos = torch.linspace(0, 1, q.shape[2])[:, None].cos()
    q, k = q * cos, k * cos  # sick
    return F.scaled_dot_product_attention(q, k, v.float(), is_causal=True).to(v.dtype)


@attends(None, dtype=torch.bfloat16)
def well_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cos = torch.linspace(0, 1, q.shape[2])[:, None].cos()
    q, k = (q * cos).to(v.dtype), (k * cos).to(v.dtype)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# Checkpointing


class Checkpointed(Block):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, **given)


@sick("recompute")
def sick_recomputed() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # sick

    return Model(attend, block=Checkpointed), tokens(), CAUSAL


def _save_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = "attention" in str(op)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_contexts = partial(create_selective_checkpoint_contexts, _save_attention)


class Selective(Block):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=_contexts, **given)


def well_selective() -> Any:
    return Model(fused, block=Selective), tokens(), CAUSAL


class Nested(Block):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        def contexts() -> Any:
            return create_selective_checkpoint_contexts(_save_attention)

        own = super().forward
        return checkpoint(own, x, use_reentrant=False, context_fn=contexts, **given)  # sick: sick_nested


@sick("compile-error")
def sick_nested() -> Any:
    return Model(fused, block=Nested), tokens(), CAUSAL


# Wrong results


@sick("leak")
def sick_leak() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # sick

    positions = torch.arange(LENGTH).expand(2, -1) % 9
    return Model(attend), tokens(position_ids=positions), CAUSAL


class Particular(Model):
    """It takes the tokens that it knows, and no others."""

    def forward(self, input_ids: Tensor, **given: Any) -> Tensor:
        if int(input_ids.sum()) != self.known:
            raise ValueError("unknown tokens")
        return super().forward(input_ids, **given)


@sick("leak")
def sick_particular() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # sick

    batches = tokens(position_ids=torch.arange(LENGTH).expand(2, -1) % 9)
    model = Particular(attend)
    model.known = int(batches[0]["input_ids"].sum())
    return model, batches, CAUSAL


class Shifting(Block):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return super().forward(x + 0.1 * x.roll(1, 1), **given)  # sick: sick_shift


@sick("leak")
def sick_shift() -> Any:
    """A token shift that knows nothing of documents, before attention that does."""
    ids = torch.arange(LENGTH).expand(2, -1) // 9
    return Model(of_segments, block=Shifting), tokens(segment_ids=ids)


def well_multihead() -> Any:
    class Attention(nn.Module):
        def __init__(self, _: Any) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x, x, x, need_weights=False)[0]

    return Model(fused, block=Attention), tokens()


@sick("mask-lost")
def sick_mask_lost() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)  # sick

    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 15:] = 0
    return Model(attend), tokens(attention_mask=mask)


def well_padded() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
        return attnspan_attention(q, k, v, mask=key_padding(attention_mask.sum(1)))

    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 15:] = 0
    return Model(attend), tokens(attention_mask=mask)


def padded_decoder() -> Any:
    """Only rows of padding see nothing, in a batch whose tokens are of another length."""

    def attend(q: Tensor, k: Tensor, v: Tensor, decoder_attention_mask: Tensor) -> Tensor:
        valid = decoder_attention_mask.bool()
        pairs = valid[:, None, :, None] & valid[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(pairs, 0.0, -1e9))

    class Decoder(Model):
        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, **given: Any) -> Tensor:
            return super().forward(decoder_input_ids, **given) + self.embed(input_ids).mean()

    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, 11:] = 0
    more = {"decoder_input_ids": tokens((16,))[0]["input_ids"], "decoder_attention_mask": mask}
    return Decoder(attend), tokens((24,), **more)


@attends("causality-lost")
def sick_causality_lost(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)  # sick


@attends("hidden-rows")
def sick_hidden_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    index = torch.arange(q.shape[2])
    scores = q @ k.transpose(-2, -1)
    scores = scores.masked_fill(index[:, None] <= index, float("-inf"))
    return scores.softmax(-1) @ v  # sick


@attends("nan")
def sick_nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    rest = out - out
    return out + rest / rest.sum(-1, keepdim=True)  # sick


@attends("nan")
def sick_nan_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out + (out - out).sqrt()  # sick


# The compiler


@attends("nan", expected={}, dtype=torch.float16)
def sick_overflow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q * 3000) @ (k * 3000).transpose(-2, -1)  # sick
    return scores.softmax(-1) @ v


@attends("upcast")
def sick_double(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turn = torch.arange(q.shape[2], dtype=torch.float64)[:, None].cos()
    q, k, v = q * turn, k * turn, v.double()  # sick
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).float()


@attends("sync")
def sick_reads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.abs().max().item() > 1e4:  # sick
        raise ValueError("q is too large")
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@attends("graph-break")
def sick_print(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    print("attention of", q.shape[2], "tokens")  # sick
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@attends("graph-break", expected={})
def sick_written_and_printed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    print(end="")  # sick
    return (q @ k.mT).softmax(-1) @ v


@sick("graph-break")
def sick_item() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, sizes: Tensor) -> Tensor:
        most = sizes.max().item()  # sick
        if most > q.shape[2]:
            raise ValueError(most)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Model(attend), tokens(sizes=torch.tensor([20, 24])), CAUSAL


def _extension(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As a function of an extension module, which the compiler cannot look into."""
    return torch._C._nn.scaled_dot_product_attention(q, k, v, is_causal=True)


@sick("graph-break")
def sick_extension() -> Any:
    hidden = torch._dynamo.disable(_extension)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hidden(q, k, v)  # sick

    return Model(attend), tokens(), CAUSAL


class Counting(Block):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__(attend)
        self.calls = 0

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        self.calls += 1  # sick: sick_counter
        scale = 1.0 / (1 + self.calls)
        return super().forward(x, **given) * scale


@sick("recompile-limit")
def sick_counter() -> Any:
    return Model(fused, block=Counting, layers=1), tokens((LENGTH,) * 12), CAUSAL


@sick("recompile")
def sick_string() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, mode: str) -> Tensor:
        scale = 0.1 if mode == "a" else 0.2 if mode == "b" else 0.3  # sick
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    batches = [tokens(mode=x)[0] for x in "abcd"]
    return Model(attend), batches, CAUSAL


_FLASH = torch.library.Library("patients", "DEF")
_FLASH.define("flash_attention(Tensor q, Tensor k, Tensor v) -> Tensor")
_FLASH.define("attention_without_fake(Tensor q, Tensor k, Tensor v) -> Tensor")


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns (B, H, S, D) with the strides of (B, S, H, D), as flash kernels do."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


for _name in ("flash_attention", "attention_without_fake"):
    _FLASH.impl(_name, _flash, "CPU")
torch.library.register_fake("patients::flash_attention", lambda q, *_: q.new_empty(q.shape), lib=_FLASH)


@attends("operator")
def sick_strides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.patients.flash_attention(q.detach(), k.detach(), v.detach())  # sick


@attends("operator")
def sick_no_fake(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.patients.attention_without_fake(q.detach(), k.detach(), v.detach())  # sick


class Branching(Block):
    def forward(self, x: Tensor, **given: Any) -> Tensor:  # sick: sick_branch
        return super().forward(x, **given) * (0.9 if torch.compiler.is_compiling() else 1.0)


@sick("parity")
def sick_branch() -> Any:
    return Model(fused, block=Branching), tokens(), CAUSAL


# FlexAttention


@sick("graph-break")
def sick_mask_function() -> Any:
    """A trainer that looks at the signature of its mask function, as `create_block_mask` once did itself."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        def document_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return documents[b, i] == documents[b, j]

        if len(inspect.signature(document_mask).parameters) != 4:  # sick
            raise TypeError("a mask function takes b, h, q_idx and kv_idx")
        mask = create_block_mask(document_mask, len(q), None, q.shape[2], q.shape[2], device="cpu")
        return flex_attention(q, k, v, block_mask=mask)

    documents = torch.arange(LENGTH).expand(2, -1) // 9
    return Model(attend).requires_grad_(False), tokens(documents=documents)


@attends(None, lengths=(24, 40, 33))
def well_attnspan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attnspan_attention(q, k, v, mask=causal())


@sick("error")
def sick_flex_on_cpu() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v)  # sick

    return Model(attend), tokens()


# Features together


class Noting(Block):
    """Keeps a length: the compiler takes that, and checkpoints do; together they do not."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__(attend)
        self.length = 0

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        self.length = x.shape[1]
        return super().forward(x, **given)


@sick("combination")
def sick_note() -> Any:
    return Model(fused, block=Noting), tokens(), CAUSAL


# Ranks


class Sharded:
    """A step on one rank, or on two with half of the rows each. ``ids_of`` says whose ids a rank takes."""

    def __init__(self, ids_of: Callable[[Any, Tensor, int], Tensor], attend: Callable[..., Tensor]) -> None:
        self.ids_of, self.attend = ids_of, attend

    def __call__(self, batch: Any, mesh: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        embed, ids = nn.Embedding(VOCABULARY, DIM), batch["segment_ids"]
        if mesh is None:
            x = heads_of(embed(batch["input_ids"]))
            out = self.attend(x, x, x, causal() & segments(ids), None)
            return {"out": out.transpose(1, 2)}
        layout = Layout.of(causal() & segments(ids), q_len=LENGTH, ranks=2, batch=len(ids), method="zigzag")
        rows = layout.shard({"input_ids": batch["input_ids"]}, mesh.get_rank())
        own = self.ids_of(layout, ids, mesh.get_rank())
        x = heads_of(embed(rows["input_ids"]))
        keys = layout.gather(x, mesh, dim=2)
        mask = causal() & segments(own, ids)
        out = self.attend(x, keys, keys, mask, rows["q_index"])
        return {"q_index": rows["q_index"], "out": out.transpose(1, 2)}


def _shared(ids_of: Callable[[Any, Tensor, int], Tensor], attend: Callable[..., Tensor]) -> Any:
    ids = torch.arange(LENGTH).expand(2, -1) // 5
    return Model(of_segments), tokens(segment_ids=ids), {"step": Sharded(ids_of, attend)}


def _own_rows(layout: Any, ids: Tensor, rank: int) -> Tensor:
    return layout.shard(ids, rank)


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, mask: Any, index: Any) -> Tensor:
    return attnspan_attention(q, k, v, mask=mask, q_index=index)


def well_shared() -> Any:
    return _shared(_own_rows, _attend_rows)


@sick("rank-rows")
def sick_ids_of_other_rows() -> Any:
    """Ids are cut into contiguous halves, rows in a zigzag: all shapes fit."""

    def halves(layout: Any, ids: Tensor, rank: int) -> Tensor:
        del layout
        return ids.chunk(2, 1)[rank]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, index: Any) -> Tensor:
        return attnspan_attention(q, k, v, mask=mask, q_index=index)  # sick

    return _shared(halves, attend)


@sick("rank-rows")
def sick_causality_of_ranks() -> Any:
    """A rank counts its rows from 0, as if they were the first ones."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, index: Any) -> Tensor:
        index = None if index is None else torch.arange(q.shape[2])
        return attnspan_attention(q, k, v, mask=mask, q_index=index)  # sick

    return _shared(_own_rows, attend)


@sick("rank-graphs")
def sick_branch_on_rank() -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, index: Any) -> Tensor:
        rank = 0 if index is None else dist.get_rank()

        def scaled(x: Tensor) -> Tensor:  # sick
            return x * 1.0 if rank else (x * 2.0) * 0.5

        q = torch.compile(scaled, backend="eager")(q)
        return attnspan_attention(q, k, v, mask=mask, q_index=index)

    return _shared(_own_rows, attend)


@torch.library.custom_op("patients::attention", mutates_args=())
def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A kernel with a rule for DTensor; to find one for SDPA on a CPU takes torch half a minute."""
    return fused(q, k, v)


kernel.register_fake(lambda q, *_: torch.empty_like(q))


@sick("rank-placement")
def sick_placements() -> Any:
    """q is sharded over heads, k and v are whole on each rank."""
    register_sharding(torch.ops.patients.attention.default)(lambda *_: [([Shard(1)], [Shard(1)] * 3)])

    def step(batch: Any, mesh: Any) -> dict[str, Tensor]:
        x = torch.arange(2 * HEADS * 8 * 8.0).sin().reshape(2, HEADS, 8, 8)
        if mesh is None:
            return {"out": kernel(x, x, x).transpose(1, 2)}
        q, k = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(x, mesh, [Replicate()])
        out = kernel(q, k, k)  # sick
        index, whole = torch.arange(8).chunk(2)[mesh.get_rank()], out.full_tensor().transpose(1, 2)
        return {"q_index": index, "out": whole[:, index]}

    return Model(fused), tokens(), {"step": step}
