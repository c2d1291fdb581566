"""The model: both attentions agree, documents do not see each other, work is counted rightly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attnspan.kernels import cpu
from attnspan.train.attention import attend, keep_attention, prepare_mask
from attnspan.train.config import TrainConfig
from attnspan.train.model import Decoder, Rotary, matmul_parameters, rotary_table, rotate, step_flops
from attnspan.train.optimizer import build_optimizer, learning_rate
from attnspan.train.packing import IGNORE, PADDING, Batch, Corpus, PackedStream, pack_once
from attnspan.train.step import Stepper, token_loss

VOCAB = 257
Tiny = Callable[..., TrainConfig]


def batch_of(config: TrainConfig, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 40, 1, 17, 90, 3)]
    corpus = Corpus.from_documents(texts, end=256, num_bytes=156)
    batches = pack_once(corpus, seq_len=config.seq_len, batch_size=4)
    assert len(batches) == 1
    assert (batches[0].ids == PADDING).any(), "padding is part of what is tested"
    return batches[0]


def build(config: TrainConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(config, VOCAB)
    for (
        parameter
    ) in model.parameters():  # standard-normal activations, so that attention has something to choose
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.to(dtype)


def outcome(model: Decoder, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Logits where there is a target, and all gradients of a random projection of them."""
    mask = prepare_mask(batch.ids, model.config.attention)
    logits = model(batch.tokens, batch.positions, mask.mask)[batch.targets != IGNORE]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    model.zero_grad(set_to_none=True)
    torch.autograd.backward((logits * weights).sum())
    return logits.detach().double(), [parameter.grad.double() for parameter in model.parameters()]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("ac", ["none", "selective", "full"])
def test_attnspan_is_as_near_to_float64_as_sdpa(tiny: Tiny, ac: str) -> None:
    config = tiny(ac=ac)
    batch = batch_of(config)
    exact, exact_gradients = outcome(build(replace(config, attention="sdpa"), torch.float64), batch)
    theirs, their_gradients = outcome(build(replace(config, attention="sdpa")), batch)
    ours, our_gradients = outcome(build(config), batch)
    # Twice the error that the same model makes with torch's own float32 attention.
    assert 0 < distance(ours, exact) <= 2 * distance(theirs, exact)
    for mine, their, wanted in zip(our_gradients, their_gradients, exact_gradients, strict=True):
        assert distance(mine, wanted) <= 2 * distance(their, wanted)


@pytest.mark.parametrize("ac", ["none", "selective", "full"])
def test_sdpa_per_document_is_sdpa_under_a_dense_mask(tiny: Tiny, ac: str) -> None:
    config = tiny(attention="sdpa-documents", ac=ac)
    batch = batch_of(config)
    exact, exact_gradients = outcome(build(replace(config, attention="sdpa"), torch.float64), batch)
    logits, gradients = outcome(build(config, torch.float64), batch)
    # The sums are the same, in another order: some hundred roundings of float64.
    tolerance = 1000 * torch.finfo(torch.float64).eps
    assert distance(logits, exact) < tolerance
    for mine, wanted in zip(gradients, exact_gradients, strict=True):
        assert distance(mine, wanted) < tolerance


def test_padding_attends_to_nothing_per_document_too() -> None:
    ids = torch.tensor([[0, 0, PADDING]], dtype=torch.int32)
    q, k, v = (torch.ones(1, 3, heads, 4) for heads in (2, 1, 1))
    outs = [
        attend(q, k, v, prepare_mask(ids, kind).mask)[0, :, 0, 0] for kind in ("attnspan", "sdpa-documents")
    ]
    assert outs[0].tolist() == outs[1].tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("kind", ["attnspan", "sdpa", "sdpa-documents"])
def test_a_document_does_not_depend_on_its_neighbours(tiny: Tiny, kind: str) -> None:
    config = tiny(attention=kind)
    model, batch = build(config), batch_of(config)
    changed = batch.tokens.clone()
    elsewhere = batch.ids != 1
    changed[elsewhere] = (changed[elsewhere] + 100) % 256
    mask = prepare_mask(batch.ids, kind).mask
    with torch.no_grad():
        before, after = (model(tokens, batch.positions, mask) for tokens in (batch.tokens, changed))
    assert torch.equal(before[~elsewhere], after[~elsewhere])
    assert not torch.equal(before[elsewhere], after[elsewhere])


def test_a_document_reads_the_same_alone_and_packed(tiny: Tiny) -> None:
    config = tiny()
    model, batch = build(config, torch.float64), batch_of(config)
    with torch.no_grad():
        packed = model(batch.tokens, batch.positions, prepare_mask(batch.ids, "sdpa").mask)
        here = batch.ids[0] == 1
        tokens = batch.tokens[0, here][None]
        mask = prepare_mask(torch.zeros_like(tokens, dtype=torch.int32), "sdpa").mask
        alone = model(tokens, torch.arange(tokens.shape[1])[None], mask)
    # The sums are the same, in another order: some hundred roundings of float64.
    assert distance(packed[0, here], alone[0]) < 1000 * torch.finfo(torch.float64).eps


def test_only_distances_between_positions_matter(tiny: Tiny) -> None:
    config = tiny()
    model, batch = build(config), batch_of(config)
    mask = prepare_mask(batch.ids, "sdpa").mask
    with torch.no_grad():
        model.cos, model.sin = rotary_table(2 * config.seq_len, config.head_dim, config.rope_theta)
        plain, shifted, stretched = (
            model(batch.tokens, positions, mask)
            for positions in (batch.positions, batch.positions + 7, batch.positions * 2)
        )
    # The angles of other positions round otherwise: some hundred roundings of float32.
    assert distance(shifted, plain) < 1000 * torch.finfo(torch.float32).eps
    assert distance(stretched, plain) > 0.01


def test_rotation_keeps_lengths_and_depends_on_the_distance_alone() -> None:
    cos, sin = rotary_table(20, 8, 10_000.0)
    q, k = torch.randn(2, 8, dtype=torch.float64)
    score = {}
    for i, j in ((3, 1), (12, 10), (12, 9)):
        a, b = (
            rotate(x.float()[None, None, None], Rotary(cos[p][None, None, None], sin[p][None, None, None]))
            for x, p in ((q, i), (k, j))
        )
        score[i, j] = float((a * b).sum())
        assert float(a.norm()) == pytest.approx(float(q.norm()), rel=1e-6)
    assert score[3, 1] == pytest.approx(score[12, 10], rel=1e-5)
    assert score[12, 9] != pytest.approx(score[12, 10], rel=1e-3)


def test_the_loss_ignores_padding_and_sums_the_rest() -> None:
    logits, targets = torch.randn(1, 3, 5), torch.tensor([[2, IGNORE, 4]])
    expected = -sum(float(logits[0, i].log_softmax(-1)[t]) for i, t in ((0, 2), (2, 4)))
    assert float(token_loss(logits, targets)) == pytest.approx(expected, rel=1e-6)
    poisoned = logits.clone()
    poisoned[0, 1] = float("inf")
    assert torch.equal(token_loss(logits, targets), token_loss(poisoned.nan_to_num(posinf=1e9), targets))


def test_the_step_normalises_by_the_targets_that_count(tiny: Tiny) -> None:
    stepper = Stepper(tiny(), VOCAB)
    batch = batch_of(stepper.config)
    total = stepper.loss(stepper.deal(batch)).item()
    assert stepper.step(batch, 0).loss == pytest.approx(total / batch.num_targets, rel=1e-6)


def test_bits_per_byte_of_a_uniform_model_is_the_logarithm_of_the_vocabulary(tiny: Tiny) -> None:
    stepper = Stepper(tiny(), VOCAB)
    nn.init.zeros_(stepper.model.head.weight)
    corpus = Corpus.from_documents([list(range(100))], end=256, num_bytes=100, close=False)
    batches = pack_once(corpus, seq_len=48, batch_size=2)
    assert stepper.bits_per_byte(batches, 100) == pytest.approx(math.log2(VOCAB), rel=1e-6)


def test_work_is_counted_on_visible_pairs() -> None:
    ids = torch.tensor([[0, 0, 0, 1, PADDING]], dtype=torch.int32)
    for kind in ("attnspan", "sdpa"):
        assert prepare_mask(ids, kind).pairs == 3 * 4 // 2 + 1
    config = TrainConfig(dim=8, layers=3, heads=2, kv_heads=1, head_dim=4, hidden=16)
    model = Decoder(config, 10)
    assert matmul_parameters(model) == 3 * (8 * 16 + 8 * 8 + 8 * 32 + 16 * 8) + 8 * 10
    flops = step_flops(model, tokens=5, pairs=7)
    assert flops.attention == 3 * 2 * 7 * 4 * (4 + 10)  # 2 products of 2 D forward, 5 backward
    assert flops.total == 6 * matmul_parameters(model) * 5 + flops.attention


def test_only_matrices_decay(tiny: Tiny) -> None:
    model = Decoder(tiny(), VOCAB)
    decay, none = build_optimizer(model, tiny()).param_groups
    assert decay["weight_decay"] == 0.1
    assert none["weight_decay"] == 0
    assert all(parameter.ndim >= 2 for parameter in decay["params"])
    assert all(parameter.ndim == 1 for parameter in none["params"])
    assert len(decay["params"]) + len(none["params"]) == len(list(model.parameters()))


def test_the_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    config = TrainConfig(lr=2.0, warmup=4, steps=24, min_lr=0.25)
    rates = [learning_rate(step, config) for step in range(24)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert max(rates) == 2.0
    assert rates[-1] == pytest.approx(0.5)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert rates[4 + 19 // 2] == pytest.approx(1.25, abs=0.1)


def test_clipping_bounds_the_step(tiny: Tiny) -> None:
    stepper = Stepper(tiny(clip=1e-3), VOCAB)
    seen: list[float] = []
    stepper.optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(nn.utils.get_total_norm(p.grad for p in stepper.model.parameters())))
    )
    assert stepper.step(batch_of(stepper.config), 0).grad_norm > 1e-3
    assert seen[0] == pytest.approx(1e-3, rel=1e-3)


def test_training_learns(tiny: Tiny) -> None:
    config = tiny(lr=1e-2, steps=30)
    stepper = Stepper(config, VOCAB)
    corpus = Corpus.from_documents([list(b"abcdefgh" * 6)] * 4, end=256, num_bytes=192)
    stream = PackedStream(corpus, seq_len=config.seq_len, batch_size=2, seed=0)
    losses = [stepper.step(batch, index).loss for index, batch in zip(range(30), stream, strict=False)]
    assert losses[0] > 5
    assert losses[-1] < 1


@pytest.mark.parametrize(("ac", "calls"), [("none", 1), ("selective", 1), ("full", 2)])
def test_checkpointing_recomputes_attention_only_where_it_is_told_to(tiny: Tiny, ac: str, calls: int) -> None:
    stepper = Stepper(tiny(ac=ac), VOCAB)
    before = cpu.counters()["forward"]["calls"]
    stepper.step(batch_of(stepper.config), 0)
    assert cpu.counters()["forward"]["calls"] - before == calls * stepper.config.layers


def test_the_policy_keeps_attention_and_nothing_else() -> None:
    aten = torch.ops.aten
    kept = {
        op: keep_attention(None, op).name
        for op in (
            torch.ops.attnspan.forward.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten.mm.default,
        )
    }
    assert list(kept.values()) == ["MUST_SAVE", "MUST_SAVE", "PREFER_RECOMPUTE"]
