"""attnspan in torchtitan 0.3: ``--override.imports attnspan.integrations.torchtitan.attention``.

Importing this module registers the override and calls `enable`. Models still request FlexAttention's masks.
For attnspan's layers, the function that makes these masks returns spans, and the function that shards them
for context parallelism takes this rank's queries. Everything else works as before, also FlexAttention's own
layers.
"""

import functools
from abc import ABCMeta
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnspan.base.installed import require, require_names
from attnspan.errors import ShapeError, UsageError, expect
from attnspan.masks import Prepared
from attnspan.masks.bounds import Spans
from attnspan.parallel import Layout
from attnspan.torch import SAVE_OPS, compat
from attnspan.torch import attention as span_attention
from attnspan.torch.block_mask import to_block_mask
from attnspan.torch.choice import torchs_backend

require("torchtitan", "attnspan.integrations.torchtitan", "torchtitan", ("0.3", "0.4"))

import spmd_types as spmd  # noqa: E402
from spmd_types.runtime import get_partition_spec  # noqa: E402
from torchtitan.config.configurable import Configurable  # noqa: E402
from torchtitan.config.override import override  # noqa: E402
from torchtitan.distributed import activation_checkpoint  # noqa: E402
from torchtitan.distributed.context_parallel import api as context_parallel  # noqa: E402
from torchtitan.distributed.utils import get_spmd_backend  # noqa: E402
from torchtitan.models.common import attention as theirs  # noqa: E402

from ._all_pairs import AllPairsWarning  # noqa: E402
from ._patches import Patches  # noqa: E402
from ._torchtitan_masks import SpanMask, make_mask  # noqa: E402

__all__ = ["AllPairsWarning", "Attention", "SpanMask", "attention", "disable", "enable", "make_mask"]


torchs = compat.context_parallel()


class _SpansWanted(int):
    """A block size that marks masks for attnspan's layers."""


class Attention(theirs.FlexAttention):  # type: ignore[misc]
    """The inner attention of a decoder layer, computed by attnspan.

    It is a subclass of FlexAttention, because torchtitan treats masks and ranks according to this class.

    Example:
        >>> from torch.nn.attention.flex_attention import noop_mask
        >>> q = torch.randn(2, 8, 4, 16)
        >>> Attention.Config().build()(q, q, q, attention_masks=make_mask(noop_mask, 2, None, 8, 8)).shape
        torch.Size([2, 8, 4, 16])
    """

    @dataclass(kw_only=True, slots=True)
    class Config(theirs.FlexAttention.Config):  # type: ignore[misc]
        """Config that `attention` puts in place of an inner attention's config.

        Attributes:
            block_size: Tells the maker of masks that spans are wanted. Do not change it.
            window: Most keys that a query may see in the layer's masks, including itself. 0 for no limit.
        """

        block_size: int | tuple[int, int] = field(default_factory=lambda: _SpansWanted(128))
        window: int = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.window = config.window

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: SpanMask,
        scale: float | None = None,
        enable_gqa: bool = False,
        score_mod: None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Compute attention for torchtitan's layers.

        torchtitan shards by the names of the first three arguments.

        Args:
            q_BLNH: Queries, shape (B, rows, Hq, D).
            k_BLNH: Keys of all ranks of context parallelism, shape (B, S, Hkv, D). Hkv divides Hq.
            v_BLNH: Values, shape (B, S, Hkv, Dv).
            attention_masks: A mask from `make_mask`.
            scale: Factor of the scores. Default: 1/sqrt(D).
            enable_gqa: Has no effect. There may always be fewer key heads than query heads.
            score_mod: Must be None.
            out_transform: Function of the output (B, rows, Hq, Dv) and lse (B, rows, Hq) that returns the
                result. Sinks use it.

        Returns:
            Shape (B, rows, Hq, Dv).

        Raises:
            UsageError: The mask belongs to another backend or lacks the layer's window, or there is a
                ``score_mod``.
        """
        del enable_gqa
        remedy = "Keep torchtitan's attention for this layer, with your own override with fqns="
        got = type(attention_masks).__name__
        fits = isinstance(attention_masks, SpanMask)
        expect(fits, "attention_masks", "a SpanMask from Decoder", got, remedy, error=UsageError)
        expect(score_mod is None, "score_mod", "None", "a function", remedy, error=UsageError)
        fits = self.window in (0, attention_masks.window)
        expected = "a mask with the window of {} that VarlenAttention had"
        expect(fits, "attention_masks", expected, "another", remedy, self.window, error=UsageError)
        with spmd.no_typecheck():
            k, v = (_in_order(x, attention_masks.k_order) for x in (k_BLNH, v_BLNH))
            mask = Prepared(Spans(attention_masks.bounds, k.shape[1]), bare=True)
            asked: Any = {"layout": "bshd", "return_lse": True, "backend": torchs_backend()}
            out, lse = span_attention(q_BLNH, k, v, mask=mask, scale=scale, **asked)
        lse = lse.transpose(1, 2)
        if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
            axes, split = spmd.get_local_type(q_BLNH), get_partition_spec(q_BLNH)
            spmd.assert_type(out, axes, split)
            spmd.assert_type(lse, axes, None if split is None else spmd.PartitionSpec(*split[:-1]))
        return out if out_transform is None else out_transform(out, lse)


def _in_order(x: Tensor, k_order: Tensor | None) -> Tensor:
    """Return tokens (B, S, ...) that a load balancer permuted in the order of the sequence."""
    if k_order is None:
        return x
    if k_order.shape[0] == 1:
        return x.index_select(1, k_order[0])
    return x.gather(1, k_order[:, :, None, None].expand_as(x))


class _InnerAttention(Configurable.Config, metaclass=ABCMeta):  # type: ignore[misc]
    """The configs of torchtitan that `attention` replaces."""


_InnerAttention.register(theirs.FlexAttention.Config)
_InnerAttention.register(theirs.VarlenAttention.Config)
_InnerAttention.register(theirs.ScaledDotProductAttention.Config)


@override(  # type: ignore[untyped-decorator]
    target=_InnerAttention,
    fqns=["layers.*", "*model.layers.*", "mtp*", "*model.mtp*"],
    description="attnspan's attention, with masks as spans",
)
def attention(config: Any) -> Attention.Config:
    """Replace the inner attention of a decoder's layers: FlexAttention or VarlenAttention.

    Pass it as ``--override.imports attnspan.integrations.torchtitan.attention``, or as
    ``OverrideConfig(imports=["attnspan.integrations.torchtitan.attention"])``. torchtitan calls it once for
    each layer. It calls `enable`.

    Args:
        config: Config of the layer's inner attention.

    Returns:
        The config of attnspan's attention.

    Raises:
        OptionError: The layer has another attention, or its attention is not causal.

    Example:
        >>> from torchtitan.models.llama3 import model_registry
        >>> layers = model_registry("debugmodel").model.layers
        >>> attention(layers[0].attention.inner_attention).build()
        Attention()
    """
    covered = isinstance(config, (theirs.FlexAttention.Config, theirs.VarlenAttention.Config))
    got = type(config).__qualname__
    remedy = 'Build the model with attn_backend="flex"'
    expect(covered, "attention", "FlexAttention or VarlenAttention", got, remedy)
    left, right = getattr(config, "window_size", (-1, 0))
    expect(right == 0, "window_size", "(any, 0), which is causal", (left, right), remedy)
    enable()
    # The kernel's own options are dropped, such as Triton's block sizes.
    return Attention.Config(
        param_init=config.param_init, sharding_config=config.sharding_config, window=left + 1
    )


def _shard(
    make: Callable[..., Any],
    cp_mesh: Any,
    inputs: tuple[Any, ...],
    attention_masks: Any,
    load_balancer_type: str | None = "headtail",
    input_seq_dim: int = 1,
    ptrr_mask_key: str | None = None,
) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs and masks of this rank of context parallelism."""
    masks = attention_masks if isinstance(attention_masks, dict) else {"": attention_masks}
    if not any(isinstance(mask, SpanMask) for mask in masks.values()):
        options = load_balancer_type, input_seq_dim, ptrr_mask_key
        return make(cp_mesh, inputs, attention_masks, *options)  # type: ignore[no-any-return]
    remedy = "Set --parallelism.context_parallel_degree 1"
    for key, mask in masks.items():
        got = type(mask).__name__
        expect(isinstance(mask, SpanMask), f"mask {key}", "spans", got, remedy, error=UsageError)
    balancer = _balancer(load_balancer_type, masks, ptrr_mask_key, inputs[0].shape[input_seq_dim], cp_mesh)
    mine = torchs.shard(
        mesh=cp_mesh, buffers=inputs, seq_dims=(input_seq_dim,) * len(inputs), load_balancer=balancer
    )
    order = balancer._generate_indices().to(inputs[0].device, torch.int64)
    rows = order.chunk(cp_mesh.size(), 1)[cp_mesh.get_local_rank()][:, None, :, None, None]
    k_order = None if load_balancer_type is None else order.argsort(1)
    local = {
        key: mask._replace(bounds=mask.bounds.take_along_dim(rows, 2), k_order=k_order)
        for key, mask in masks.items()
    }
    return tuple(mine), local if isinstance(attention_masks, dict) else local[""]


class _Fixed(torchs.LoadBalancer):  # type: ignore[misc,name-defined]
    """A known order of tokens, shape (1|B, S)."""

    def __init__(self, order: Tensor) -> None:
        self.order = order

    def _generate_indices(self, restore: bool = False) -> Tensor:
        return self.order.argsort(1) if restore else self.order


def _balancer(
    kind: str | None, masks: dict[str, SpanMask], key: str | None, seq_len: int, cp_mesh: Any
) -> Any:
    """Return the balancer that permutes tokens before each rank takes its part."""
    what, remedy = "context parallelism: the length of a sequence", "Change --training.seq_len or the degree"
    ranks, bounds = cp_mesh.size(), next(iter(masks.values())).bounds
    unit = {"headtail": 2 * ranks, "ptrr": 128 * ranks}.get(kind or "", ranks)
    expect(seq_len % unit == 0, what, "a multiple of {}", seq_len, remedy, unit, error=ShapeError)
    if kind is None:
        return _Fixed(torch.arange(seq_len, device=bounds.device)[None])
    if kind == "headtail":
        return torchs.HeadTailLoadBalancer(seq_len, ranks, bounds.device)
    if kind == "ptrr":
        remedy = "Set --parallelism.context_parallel_ptrr_mask_key"
        key = next(iter(masks)) if len(masks) == 1 else key
        expect(key in masks, "context_parallel_ptrr_mask_key", " or ".join(masks), str(key), remedy)
        spans = Spans(masks[str(key)].bounds, seq_len)
        return torchs.PTRRLoadBalancer(to_block_mask(spans, seq_len, seq_len, batch=len(bounds)), ranks)
    names = 'None, "headtail", "ptrr" or "attnspan"'
    remedy = "Set --parallelism.context_parallel_load_balancer"
    expect(kind == "attnspan", "context_parallel_load_balancer", names, kind, remedy)
    every = [Spans(mask.bounds, seq_len) for mask in masks.values()]
    layout = Layout.of(
        max(every, key=lambda x: int(x.cost().sum())), q_len=seq_len, ranks=ranks, batch=len(bounds)
    )
    even = layout.rows_per_rank * ranks == seq_len
    expect(even, what, "a length that the ranks share evenly", seq_len, remedy)
    rows = torch.as_tensor(layout.rows.astype("int64"), device=bounds.device)
    return _Fixed(rows.transpose(0, 1).flatten(1))


def _compiled_or_spans(make: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Make spans for attnspan's layers, and the usual masks for other layers."""
    if isinstance(given.get("BLOCK_SIZE"), _SpansWanted):
        return make_mask(*args, **given)
    return make(*args, **given)


def _with_ours(make: Callable[[], set[Any]]) -> set[Any]:
    """Let selective checkpointing keep attnspan's results, as it keeps other attentions' results."""
    return make() | set(SAVE_OPS)


_patches = Patches("torchtitan")


def enable() -> None:
    """Wrap the three functions of torchtitan that make masks, shard them, and list results to keep.

    The wrappers change nothing for models with other attention. The import of this module and `attention`
    call it.

    Raises:
        ImportError: torchtitan lacks one of the functions.

    Example:
        >>> enable()  # It is enabled already.
    """
    _patches.apply(_enable)


def _enable() -> None:
    parts = (
        (theirs, "_compiled_create_block_mask", _compiled_or_spans),
        (context_parallel, "cp_shard", _shard),
        (activation_checkpoint, "_get_default_save_ops", _with_ours),
    )
    for module, name, ours in parts:
        require_names(module, [name], "attnspan.integrations.torchtitan", "torchtitan")
        _patches.set(module, name, functools.partial(ours, getattr(module, name)))


def disable() -> None:
    """Undo `enable`, so that torchtitan has its own functions again.

    Models that were built with attnspan's attention then raise an error, because they get other masks. The
    override stays registered. torchtitan uses it only if you list it, and it calls `enable`.

    Raises:
        UsageError: Another package has patched the same function since.

    Example:
        >>> disable()
        >>> enable()
    """
    _patches.undo()


enable()
