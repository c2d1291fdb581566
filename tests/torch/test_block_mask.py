"""FlexAttention's BlockMask, both ways: the same blocks, the same pairs, the same results."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)

from collections.abc import Callable

import pytest
import torch
from samples.torch_calls import BATCH, MASKS
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import attnspan
from attnspan import Mask, Spans, causal, from_block_mask, from_dense, segments, window
from attnspan.torch import attention, to_block_mask

# FlexAttention says at each eager call that it is slow.
pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")

SIZES = [(256, 256, 64), (200, 256, 64), (200, 170, (32, 64)), (5, 300, 128), (300, 5, 128), (128, 128, 128)]


def _ids(k_len: int) -> Tensor:
    return torch.randint(0, 3, (2, k_len), generator=torch.Generator().manual_seed(1)).cumsum(-1) // 40


def _documents(q_len: int, k_len: int) -> tuple[Mask, Callable[..., Tensor]]:
    """Causal segments, as a mask and as a mask_mod, which counts rows from 0."""
    ids, shift = _ids(k_len), k_len - q_len

    def mask_mod(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = q + shift
        return (k <= row) & (row >= 0) & (ids[b, row.clamp(0)] == ids[b, k])

    return causal() & segments(ids), mask_mod


def _same_lists(a: BlockMask, b: BlockMask) -> None:
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, wanted = getattr(a, f"{kind}_num_blocks"), getattr(b, f"{kind}_num_blocks")
        assert torch.equal(counts, wanted), kind
        indices, wanted = getattr(a, f"{kind}_indices"), getattr(b, f"{kind}_indices")
        assert indices.dtype == counts.dtype == torch.int32
        used = torch.arange(indices.shape[-1]) < counts[..., None]
        assert torch.equal(indices[used], wanted[used]), kind


@pytest.mark.parametrize(("q_len", "k_len", "block_size"), SIZES)
def test_the_blocks_are_those_of_create_block_mask_and_are_read_exactly(
    q_len: int, k_len: int, block_size: object
) -> None:
    mask, mask_mod = _documents(q_len, k_len)
    ours = to_block_mask(mask, q_len, k_len, batch=2, block_size=block_size)
    theirs = create_block_mask(mask_mod, 2, None, q_len, k_len, device="cpu", BLOCK_SIZE=block_size)
    assert ours.shape == theirs.shape
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    _same_lists(ours, theirs)
    got = from_block_mask(theirs).spans(q_len, k_len, batch=2, heads=3)
    assert torch.equal(got.dense(), mask.spans(q_len, k_len, batch=2).dense())


@pytest.mark.parametrize(("q_len", "k_len"), [(32, 40), (40, 32), (40, 40)])
def test_blocks_that_stick_out_are_partial_as_torchs_are(q_len: int, k_len: int) -> None:
    theirs = create_block_mask(
        lambda b, h, q, k: k >= 0, None, None, q_len, k_len, device="cpu", BLOCK_SIZE=16
    )
    _same_lists(to_block_mask(attnspan.full(), q_len, k_len, block_size=16), theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("q_len", "k_len"), [(64, 64), (50, 70), (70, 50)])
def test_flex_attention_with_the_converted_mask_gives_our_result(q_len: int, k_len: int) -> None:
    mask, _ = _documents(q_len, k_len)
    visible = torch.rand(2, 4, q_len, k_len, generator=torch.Generator().manual_seed(0)) < 0.7
    q, k, v = (torch.randn(2, 4, n, 16) for n in (q_len, k_len, k_len))
    for each in (mask & (window(20) | attnspan.global_keys(3)), from_dense(visible)):
        block_mask = to_block_mask(each, q_len, k_len, batch=2, heads=4, block_size=16)
        theirs = flex.flex_attention(q, k, v, block_mask=block_mask)
        torch.testing.assert_close(theirs, attention(q, k, v, mask=each, backend="math"))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block_size", [(8, 16), 5])
def test_every_mask_survives_the_round_trip(name: str, block_size: object) -> None:
    spans = MASKS[name]().prepare(24, 24, batch=BATCH, heads=4, like=torch.empty(0)).lowered
    block_mask = to_block_mask(spans, 24, 24, batch=BATCH, heads=4, block_size=block_size)
    assert tuple(block_mask.kv_num_blocks.shape[:2]) == tuple(spans.bounds.shape[:2])
    back = from_block_mask(block_mask).spans(24, 24, batch=BATCH, heads=4)
    wanted = spans.dense()
    assert torch.equal(back.dense().expand(wanted.shape), wanted)


def _hand_made() -> tuple[BlockMask, Tensor]:
    """Rows 0-3 see keys 4-7 whole; rows 4-6 see even keys of 0-3; entries beyond the counts are nonsense."""
    block_mask = BlockMask.from_kv_blocks(
        torch.tensor([[[0, 1]]], dtype=torch.int32),
        torch.tensor([[[[1, 9], [0, -4]]]], dtype=torch.int32),
        torch.tensor([[[1, 0]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [7, 7]]]], dtype=torch.int32),
        BLOCK_SIZE=(4, 4),
        mask_mod=lambda b, h, q, k: k % 2 == 0,
        seq_lengths=(7, 8),
        compute_q_blocks=False,
    )
    visible = torch.zeros(7, 8, dtype=torch.bool)
    visible[:4, 4:] = True
    visible[4:, [0, 2]] = True
    return block_mask, visible


def test_block_lists_made_by_hand_count_not_the_function_alone() -> None:
    block_mask, visible = _hand_made()
    assert torch.equal(from_block_mask(block_mask).spans(7, 8).dense()[0, 0], visible)
    # Indices of one's own are rows of the BlockMask; one before the first sees nothing.
    spans = from_block_mask(block_mask).spans(3, 8, q_index=torch.tensor([6, 0, -1]))
    assert torch.equal(spans.dense()[0, 0], torch.stack([visible[6], visible[0], visible[0] & False]))
    # Without full blocks only the second ones are listed.
    lists, kind = (block_mask.kv_num_blocks, block_mask.kv_indices), {"BLOCK_SIZE": (4, 4)}
    alone = BlockMask.from_kv_blocks(*lists, mask_mod=block_mask.mask_mod, seq_lengths=(7, 8), **kind)
    visible[:4] = False
    assert torch.equal(from_block_mask(alone).spans(7, 8).dense()[0, 0], visible)


@pytest.mark.slow
def test_a_block_mask_inside_a_compiled_function() -> None:
    mask, mask_mod = _documents(50, 70)
    block_mask = create_block_mask(mask_mod, 2, None, 50, 70, device="cpu", BLOCK_SIZE=16)
    q, k = torch.randn(2, 2, 50, 8), torch.randn(2, 2, 70, 8)

    def run(q: Tensor, k: Tensor, block_mask: BlockMask) -> Tensor:
        return attention(q, k, k, mask=from_block_mask(block_mask))

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, block_mask), attention(q, k, k, mask=mask))


def test_block_masks_that_do_not_fit() -> None:
    block_mask, _ = _hand_made()
    mask = from_block_mask(block_mask)
    with pytest.raises(ValueError, match="expected one entry for each query, 5, got 7"):
        mask.spans(5, 8)
    with pytest.raises(ValueError, match="expected arrays that describe 9 keys, got 8"):
        mask.spans(7, 9)
    three = create_block_mask(lambda b, h, q, k: b >= 0, 3, 2, 8, 8, device="cpu")
    with pytest.raises(ValueError, match="1 or 2 along the batch axis, got 3"):
        from_block_mask(three).spans(8, 8, batch=2, heads=2)
    with pytest.raises(ValueError, match="1 or 4 along the heads axis, got 2"):
        from_block_mask(three).spans(8, 8, batch=3, heads=4)
    with pytest.raises(ValueError, match=r"a function that raised .*sliced BlockMask"):
        from_block_mask(three[0]).spans(8, 8, heads=2)


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (lambda b, h, q, k: q >= k, {}, "to_block_mask: mask: expected a mask expression.*got the function"),
        (causal(), {"block_size": 0}, "block_size: expected 1 to"),
        (causal(), {"block_size": 8.0}, "block_size: expected an int, got float"),
        (causal(), {"block_size": (8, 8, 8)}, "block_size: expected an int, or rows and keys, got 3 numbers"),
        (segments(torch.tensor([0, 1, 0, 1])), {}, "query 0: expected ascending, disjoint spans"),
        (segments(torch.zeros(3, 4, dtype=torch.long)), {}, "expected 1 along the batch axis, got 3"),
        (Spans(torch.full((1, 1, 4, 1, 2), 9), 4), {}, r"expected .* in \[0, 4\], got \(9, 9\)"),
        (Spans(torch.zeros(1, 1, 3, 1, 2, dtype=torch.int32), 4), {}, "prepared mask: expected .* = "),
    ],
)
def test_what_cannot_be_converted_says_so(mask: object, options: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        to_block_mask(mask, 4, 4, **options)
