"""A rank's tokens of a batch for a transformers model, with a plan for each kind of its layers.

Shapes: B batch elements, S tokens of a whole sequence, n tokens of a rank. A kind of layers is a name in
``config.layer_types``, or "" if the configuration has no types.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from attnspan.errors import expect
from attnspan.masks import Prepared
from attnspan.parallel import Layout
from attnspan.parallel.lowered import lower
from attnspan.parallel.torch.mesh_plan import MeshPlan
from attnspan.testing import probe

from . import transformers as adapter
from ._transformers_masks import WRITTEN, describe, write
from ._transformers_names import attention_of

# Starts of packed documents, which the plan contains.
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_WITHOUT = "Train this model without context parallelism"


class Kind(NamedTuple):
    """Numbers of heads and head dims of one kind of layers."""

    heads: tuple[int, int]
    head_dim: int
    v_dim: int


class ReadyMask(MeshPlan):
    """A plan with four dims, which makes transformers' models treat it as a prepared mask."""

    ndim = 4


class Sharded(NamedTuple):
    """Arguments of a rank's model: its tokens, plans as the mask, and the layout that all ranks share."""

    inputs: dict[str, Any]
    layout: Layout
    batch: int

    def whole(self, x: Any, mesh: DeviceMesh) -> Any:
        """Gather all tokens of every tensor (B, n, ...) of a model's output on every rank, differentiably."""
        if isinstance(x, Tensor):
            mine = x.shape[:2] == (self.batch, self.layout.rows_per_rank)
            return self.layout.gather(x, mesh) if mine else x
        if isinstance(x, Mapping):
            return type(x)(**{name: self.whole(part, mesh) for name, part in x.items()})
        return type(x)(self.whole(part, mesh) for part in x) if type(x) in (tuple, list) else x


def base_of(model: Any) -> Any:
    """Return the transformers model inside a PEFT adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _masks(model: Any, inputs: Mapping[str, Any], batch: int, length: int) -> dict[str, Any]:
    """Return each layer kind's mask of the whole sequence: transformers' own mask, lowered by `make_mask`."""
    make = getattr(model, "create_masks_for_generate", masking_utils.create_masks_for_generate)
    like = torch.empty(batch, length, 0)  # Plans are made on the CPU.
    given = {
        name: x.cpu() for name in ("attention_mask", "token_type_ids") if (x := inputs.get(name)) is not None
    }
    # transformers 5.24 renamed the cache.
    cache = "cache" if "cache" in inspect.signature(make).parameters else "past_key_values"
    given = {"attention_mask": None, cache: None, "position_ids": inputs["position_ids"].cpu(), **given}
    found = make(config=model.config, inputs_embeds=like, **given)
    by_kind = found if isinstance(found, dict) else {"": found}
    for kind, mask in by_kind.items():
        fits = isinstance(mask, Tensor) and mask.dim() == 4
        name, got = type(model).__name__, f"layers of kind {kind!r}, which are not attention layers"
        if not kind:
            got = "layers whose masks do not come from transformers"
        expect(fits, f"context_parallel: {name}", "attention in every layer", got, _WITHOUT)
        got = "layers that select keys by content"
        expect(mask.dtype == WRITTEN, f"context_parallel: {name}", "masks of spans", got, _WITHOUT)
    return by_kind


class _Watched:
    """Record of how a model's layers attend, while it runs on a few tokens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.made: list[tuple[Tensor, str]] = []
        self.marks: dict[str, Tensor] = {}
        self.kinds: dict[str, Kind] = {}
        self.calls: list[str] = []  # description or kind of each layer's mask, in order

    def __enter__(self) -> _Watched:
        AttentionInterface.register(adapter.NAME, self.attend)
        AttentionMaskInterface.register(adapter.NAME, self.make_mask)
        return self

    def __exit__(self, *_: object) -> None:
        AttentionInterface.register(adapter.NAME, adapter.attend)
        AttentionMaskInterface.register(adapter.NAME, adapter.make_mask)

    def make_mask(self, *sizes: Any, **given: Any) -> Tensor:
        mask = adapter.make_mask(*sizes, **given)
        self.made.append((mask, describe(given.get("mask_function", masking_utils.causal_mask_function))))
        return mask

    def what(self, mask: Any) -> str:
        return next((text for made, text in self.made if made is mask), "another mask")

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *rest: Any, **given: Any
    ) -> Any:
        kind = next((kind for kind, mark in self.marks.items() if mark is mask), None)
        self.calls.append(self.what(mask) if kind is None else kind)
        if kind is not None:
            found = Kind((q.shape[1], k.shape[1]), q.shape[3], v.shape[3])
            same = self.kinds.setdefault(kind, found) == found
            got = f"{self.kinds[kind]} and {found} in layers of kind {kind!r}"
            expect(same, self.name, "the same heads in all layers of a kind", got, _WITHOUT)
        return adapter.attend(module, q, k, v, mask, *rest, **given)


def examine(model: Any) -> dict[str, Kind]:
    """Find the kinds of a model's layers by running it on three tokens, each of which sees only itself.

    Raises:
        OptionError: Tokens interact outside of attention, as in recurrent layers and convolutions. Or the
            model makes masks that plans do not support. Or the loss is not the cross entropy of next tokens.
    """
    base, name = base_of(model), f"context_parallel: {type(base_of(model)).__name__}"
    _check_config(base, name)
    tokens = torch.arange(1, 4, device=model.device)[None]
    positions = torch.arange(3, device=model.device)[None]
    batch = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    with _Watched(name) as watched, _evaluating(model):
        planned = {kind: watched.what(mask) for kind, mask in _masks(base, batch, 1, 3).items()}
        model(**batch)
        own, watched.calls = watched.calls, []
        itself = write(torch.stack([positions, positions + 1], -1).int()[None, :, :, None], 3)
        watched.marks = {kind: itself.clone() for kind in planned}
        batch["attention_mask"] = _for_model(watched.marks)
        isolation = probe(model, batch, torch.arange(3))
        loss, wanted = _losses(model, batch)
    expect(own, name, "layers that call the attention named attnspan", "none", _WITHOUT)
    theirs = [planned.get(kind, kind) for kind in watched.calls[: len(own)]]
    expected, got = (", ".join(sorted(set(x))) for x in (theirs, own))
    expect(own == theirs, f"{name}: masks of its layers", expected, got, _WITHOUT)
    got = f"a layer that mixes tokens without attention, such as a recurrent one: {isolation}"
    expect(isolation.isolated, name, "tokens that interact only through attention", got, _WITHOUT)
    expected = "the cross entropy of shift_labels over num_items_in_batch"
    expect(abs(loss - wanted) <= 1e-3 * wanted, f"{name}: loss", expected, "another loss", _WITHOUT)
    return watched.kinds


def _check_config(model: Any, name: str) -> None:
    config = model.config
    remedy = 'Load the model with attn_implementation="attnspan"'
    got = repr(attention_of(config))
    expect(attention_of(config) == adapter.NAME, name, 'attention "attnspan"', got, remedy)
    alone = not config.is_encoder_decoder and not getattr(config, "add_cross_attention", False)
    expect(alone, name, "a decoder without cross attention", "an encoder-decoder model", _WITHOUT)
    expect(model.can_generate(), name, "a causal language model", "a model that does not generate", _WITHOUT)
    routed = getattr(config.get_text_config(), "output_router_logits", False)
    remedy = "Set config.output_router_logits = False (with TRL router_aux_loss_coef=0.0)"
    got = "a router loss, which is a product of means over all tokens"
    expect(not routed, f"{name}: losses", "sums over tokens", got, remedy)
    known = inspect.signature(model.forward).parameters
    expect("position_ids" in known, name, "a model that takes position_ids", "none", _WITHOUT)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def _losses(model: Any, batch: dict[str, Any]) -> tuple[float, float]:
    """Return the model's loss of shifted labels as a sum over a given token count, and the right value."""
    shifted, count = torch.tensor([[2, -100, 0]], device=model.device), torch.tensor(5.0, device=model.device)
    labels = batch["input_ids"]
    out = model(**batch, labels=labels, shift_labels=shifted, num_items_in_batch=count)
    logits = out["logits"].float().flatten(0, 1)
    wanted = nn.functional.cross_entropy(logits, shifted.flatten(), reduction="sum") / count
    return float(out["loss"]), float(wanted)


def _for_model(by_kind: dict[str, Any]) -> Any:
    """Return masks as models take them in ``attention_mask``: one mask, or one for each of several kinds."""
    return next(iter(by_kind.values())) if len(by_kind) == 1 else dict(by_kind)


class Sharding:
    """Sharding of a model's batches over the ranks of a mesh.

    Args:
        model: The transformers model.
        kinds: Result of `examine`.
        mesh: The ranks, a mesh with one dimension.
        strategy: As in `Layout.plan`. The first batch decides "auto", so that programs do not change.
    """

    def __init__(self, model: Any, kinds: dict[str, Kind], mesh: DeviceMesh, strategy: str) -> None:
        self.model, self.kinds, self.mesh = model, kinds, mesh
        self.strategies: dict[str, Any] = dict.fromkeys(kinds, strategy)
        self.compared = False  # whether the ranks have compared their first batches

    def __call__(self, inputs: Mapping[str, Any]) -> Sharded:
        """Return this rank's part of the model's whole inputs, which are the same on all ranks."""
        tokens = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
        batch, length = tokens.shape[:2]
        inputs = {name: x for name, x in inputs.items() if x is not None}
        if "position_ids" not in inputs:
            inputs["position_ids"] = torch.arange(length, device=tokens.device)[None]
        if inputs["position_ids"].shape[0] != batch:
            inputs["position_ids"] = inputs["position_ids"].expand(batch, -1)
        masks = self._lowered(inputs, batch, length)
        widest = max(masks, key=lambda kind: masks[kind].lowered.cost().sum())
        layout = Layout.of(masks[widest], q_len=length, ranks=self.mesh.size(), batch=batch)
        if "labels" in inputs and "shift_labels" not in inputs:
            inputs["shift_labels"] = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
        whole, rest = _split(inputs, batch, length)
        rank = self.mesh.get_local_rank()
        rows = layout.shard(whole, rank)
        parts = {kind: self._plan(kind, masks[kind], layout, batch).local(rank) for kind in masks}
        plans = {kind: ReadyMask.of(part, self.mesh, rows=rows) for kind, part in parts.items()}
        mine = {name: x for name, x in rows.items() if name != "q_index"}
        return Sharded({**rest, **mine, "attention_mask": _for_model(plans)}, layout, batch)

    def _lowered(self, inputs: dict[str, Any], batch: int, length: int) -> dict[str, Prepared]:
        offsets = tuple(x if x is None else x.cpu() for x in map(inputs.get, _OFFSETS[:2]))
        like = torch.empty(batch, 1, length, 0)
        found = {}
        for kind, given in _masks(self.model, inputs, batch, length).items():
            mask, bias = adapter._read(given, True, None, like, like, offsets)  # type: ignore[arg-type]
            what, remedy = "attention_mask with context parallelism", "Pass a boolean mask"
            expect(bias is None, what, "a mask", "floating scores", remedy)
            found[kind] = lower(mask, length, length, batch, 1)
        return {kind: found[kind] for kind in self.kinds}

    def _plan(self, kind: str, mask: Prepared, layout: Layout, batch: int) -> Any:
        sizes = self.kinds[kind]._asdict()
        plan = layout.plan(mask, strategy=self.strategies[kind], batch=batch, **sizes)
        self.strategies[kind] = plan.strategy
        return plan


def _split(inputs: Mapping[str, Any], batch: int, length: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a batch into inputs with an entry for each token, and inputs that all ranks need whole."""
    whole, rest = {}, {}
    for name, x in inputs.items():
        if name == "attention_mask" or name in _OFFSETS:
            continue
        if not isinstance(x, Tensor) or (x.numel() == 1 and x.shape[:2] != (batch, length)):
            rest[name] = x
            continue
        remedy = "Train only on tokens, or without context parallelism"
        fits, what = x.shape[:2] == (batch, length), f"{name} with context parallelism"
        wanted = f"shape ({batch}, {length}, ...), an entry for each token"
        expect(fits, what, wanted, tuple(x.shape), remedy)
        whole[name] = x
    return whole, rest
