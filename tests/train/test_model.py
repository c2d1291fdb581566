"""The model: both attentions agree, documents do not see each other, work is counted rightly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from attnspan.kernels import cpu
from train.config import TrainConfig
from train.data import IGNORE, PADDING, PackedStream, make_batch
from train.documents import Corpus
from train.model import Decoder, keep_attention, rotary_table, token_loss
from train.step import Stepper, learning_rate

VOCAB = 257
Tiny = Callable[..., TrainConfig]


def batch_of(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 40, 1, 17, 90, 3)]
    corpus = Corpus.of(texts, end=256, num_bytes=156)
    rows = list(PackedStream(corpus, config.seq_len, 4 // config.accumulate, seed=None))
    assert (rows[-1].ids == PADDING).any(), "padding is part of what is tested"
    return make_batch(config, rows, 0)


def part_of(config):
    [part] = batch_of(config).parts
    return part


def build(config, dtype=torch.float32):
    torch.manual_seed(0)
    model = Decoder(config, VOCAB)
    # Standard-normal activations, so that attention has something to choose.
    for parameter in (each for each in model.parameters() if each.ndim >= 2):
        nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.to(dtype)


def outcome(config, dtype=torch.float32):
    """Logits where there is a target, and all gradients of a random projection of them."""
    part, model = part_of(config), build(config, dtype)
    logits = model(part.tokens, part.positions, part.mask)[part.targets != IGNORE]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    torch.autograd.backward((logits * weights).sum())
    return [logits.detach().double(), *(parameter.grad.double() for parameter in model.parameters())]


def distance(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("ac", ["none", "selective", "full"])
def test_attentions_agree(tiny, ac):
    exact = outcome(tiny(ac=ac, attention="sdpa"), torch.float64)
    # Twice the error that the same model makes with torch's own float32 attention.
    ours, theirs = (outcome(tiny(ac=ac, attention=kind)) for kind in ("attnspan", "sdpa"))
    for mine, other, wanted in zip(ours, theirs, exact, strict=True):
        assert 0 < distance(mine, wanted) <= 2 * distance(other, wanted)
    # The sums are the same, in another order: some hundred roundings of float64.
    for mine, wanted in zip(
        outcome(tiny(ac=ac, attention="sdpa-documents"), torch.float64), exact, strict=True
    ):
        assert distance(mine, wanted) < 1000 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("kind", ["attnspan", "sdpa", "sdpa-documents"])
def test_a_document_does_not_depend_on_its_neighbours(tiny, kind):
    config = tiny(attention=kind)
    model, part = build(config), part_of(config)
    elsewhere = part.positions.eq(0).cumsum(1) != 2  # All but the second segment of each row.
    changed = torch.where(elsewhere, (part.tokens + 100) % 256, part.tokens)
    with torch.no_grad():
        before, after = (model(tokens, part.positions, part.mask) for tokens in (part.tokens, changed))
    assert torch.equal(before[~elsewhere], after[~elsewhere])
    assert not torch.equal(before[elsewhere], after[elsewhere])


def test_only_distances_between_positions_matter(tiny):
    config = tiny(attention="sdpa")
    model, part = build(config), part_of(config)
    with torch.no_grad():
        model.rotary = rotary_table(tiny(seq_len=2 * config.seq_len))
        moved = part.positions, part.positions + 7, part.positions * 2
        plain, shifted, stretched = (model(part.tokens, positions, part.mask) for positions in moved)
    # The angles of other positions round otherwise: some hundred roundings of float32.
    assert distance(shifted, plain) < 1000 * torch.finfo(torch.float32).eps
    assert distance(stretched, plain) > 0.01


def test_the_loss_ignores_padding_and_the_step_normalises_by_the_targets_that_count(tiny):
    logits, targets = torch.randn(1, 3, 5), torch.tensor([[2, IGNORE, 4]])
    expected = -sum(float(logits[0, i].log_softmax(-1)[t]) for i, t in ((0, 2), (2, 4)))
    assert float(token_loss(logits, targets)) == pytest.approx(expected, rel=1e-6)
    poisoned = logits.clone()
    poisoned[0, 1] = 1e9
    assert torch.equal(token_loss(logits, targets), token_loss(poisoned, targets))
    stepper = Stepper(tiny(), VOCAB)
    batch = batch_of(stepper.config)
    total = stepper.loss(batch.parts[0]).item()
    assert stepper.step(batch, 0).loss == pytest.approx(total / batch.targets, rel=1e-6)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_micro_batches_add_up_to_the_batch(tiny, accumulate):
    whole, parts = Stepper(tiny(), VOCAB), Stepper(tiny(accumulate=accumulate), VOCAB)
    for step in range(3):
        expected, found = (each.step(batch_of(each.config, step), step) for each in (whole, parts))
        # The sums are the same, in another order.
        wanted = pytest.approx((expected.loss, expected.grad_norm), rel=20 * torch.finfo(torch.float32).eps)
        assert (found.loss, found.grad_norm) == wanted


def test_bits_per_byte_of_a_uniform_model_is_the_logarithm_of_the_vocabulary(tiny):
    stepper = Stepper(tiny(), VOCAB)
    nn.init.zeros_(stepper.model.head.weight)
    corpus = Corpus.of([list(range(100))], end=256, num_bytes=100, close=False)
    assert stepper.bits_per_byte(corpus) == pytest.approx(math.log2(VOCAB), rel=1e-6)


@pytest.mark.parametrize("kind", ["attnspan", "sdpa"])
def test_work_is_counted_on_visible_pairs(kind):
    sizes = {"dim": 8, "layers": 3, "heads": 2, "kv_heads": 1, "head_dim": 4, "hidden": 16, "seq_len": 5}
    config = TrainConfig(**sizes, attention=kind)
    corpus = Corpus.of([[1, 2, 3], [4]], end=9, num_bytes=4, close=False)
    [rows] = PackedStream(corpus, 5, 1, seed=None)
    assert make_batch(config, [rows], 0).pairs == 3 * 4 // 2 + 1
    model = Decoder(config, 10)
    assert model.matmul_weights == 3 * (8 * 16 + 8 * 8 + 8 * 32 + 16 * 8) + 8 * 10
    attention = 3 * 2 * 7 * 4 * (4 + 10)  # 2 products of 2 D forward, 5 backward
    assert model.step_flops(tokens=5, pairs=7) == (6 * model.matmul_weights * 5 + attention, attention)


def test_only_matrices_decay_and_the_seed_decides_the_weights(tiny):
    stepper, other = Stepper(tiny(), VOCAB), Stepper(tiny(seed=1), VOCAB)
    decay, none = stepper.optimizer.param_groups
    assert (decay["weight_decay"], none["weight_decay"]) == (0.1, 0)
    assert all(parameter.ndim >= 2 for parameter in decay["params"])
    assert all(parameter.ndim == 1 and (parameter == 1).all() for parameter in none["params"])
    assert len(decay["params"]) + len(none["params"]) == len(list(stepper.model.parameters()))
    models = [each.model for each in (stepper, Stepper(tiny(), VOCAB), other)]
    weights = [model.blocks[1].feed_forward.out.weight for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert float(weights[0].detach().std()) == pytest.approx(0.02 / 2, rel=0.1)


def test_the_learning_rate_warms_up_and_falls_to_its_floor():
    config = TrainConfig(lr=2.0, warmup=4, steps=24, min_lr=0.25)
    rates = [learning_rate(step, config) for step in range(24)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert max(rates) == 2.0
    assert rates[-1] == pytest.approx(0.5)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert rates[4 + 19 // 2] == pytest.approx(1.25, abs=0.1)


def test_clipping_bounds_the_step(tiny):
    stepper = Stepper(tiny(clip=1e-3), VOCAB)
    seen: list[float] = []
    stepper.optimizer.register_step_pre_hook(
        lambda *_: seen.append(float(nn.utils.get_total_norm(p.grad for p in stepper.model.parameters())))
    )
    assert stepper.step(batch_of(stepper.config), 0).grad_norm > 1e-3
    assert seen[0] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_learns(tiny, dtype):
    config = tiny(lr=1e-2, steps=30, dtype=dtype)
    stepper = Stepper(config, VOCAB)
    corpus = Corpus.of([list(b"abcdefgh" * 6)] * 4, end=256, num_bytes=192)
    stream = PackedStream(corpus, seq_len=config.seq_len, batch_size=2, seed=0)
    batches = (make_batch(config, [next(stream)], 0) for _ in range(30))
    losses = [stepper.step(batch, index).loss for index, batch in enumerate(batches)]
    assert losses[0] > 5
    assert losses[-1] < 1


@pytest.mark.parametrize(("ac", "calls"), [("none", 1), ("selective", 1), ("full", 2)])
def test_checkpointing_recomputes_attention_only_where_it_is_told_to(tiny, ac, calls):
    stepper = Stepper(tiny(ac=ac), VOCAB)
    before = cpu.counters()["forward"]["calls"]
    stepper.step(batch_of(stepper.config), 0)
    assert cpu.counters()["forward"]["calls"] - before == calls * stepper.config.layers
    # Selective checkpointing keeps attention and nothing else.
    aten = torch.ops.aten
    ops = torch.ops.attnspan.attention, aten._scaled_dot_product_flash_attention_for_cpu, aten.mm
    kept = [keep_attention(None, op.default).name for op in ops]
    assert kept == ["MUST_SAVE", "MUST_SAVE", "PREFER_RECOMPUTE"]
