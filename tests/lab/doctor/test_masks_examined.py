"""Documents, padding and masks in all spellings: what the doctor reads, tries, and leaves unexamined."""

import re

import pytest
import torch
from sick_costs import ONE_COPY, float_windows, fused_windows, written_windows
from sick_masks import (
    OTHERS,
    PACKED,
    SPELLINGS,
    STEPS,
    LearnedBias,
    OtherSequence,
    Static,
    by_product,
    document_case,
    documents_unseen,
    finite_number,
    in_prefill,
    kept,
    with_attention,
)
from sick_padding import mean, per_image, pooled
from small_models import EARLIER, HEADS, LENGTH, SDPA, SIZE, Model, builder, fused, model_of, tokens, written
from torch import nn
from torch_runner import examined, found_in, grave

from attnspan_lab.doctor.torch.isolation.declared import Declared
from attnspan_lab.doctor.torch.masks.forms import forms
from attnspan_lab.doctor.torch.masks.hiding_values import HIDDEN, highest_hiding, highest_hiding_in

pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = pytest.mark.slow


# Documents and padding


@SLOW
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_documents_are_known_in_every_spelling(spelling):
    _, well = document_case(**SPELLINGS[spelling])
    found, facts = examined(well)
    assert found == ()
    assert facts["checked"]["documents"] == f"read from {next(iter(SPELLINGS[spelling]))}"


@SLOW
@pytest.mark.parametrize("name", OTHERS)
def test_other_tensors_are_no_documents(name):
    found, facts = examined(document_case(**OTHERS[name])[0])
    assert found == ()
    assert "no batch has several documents" in facts["unchecked"]["documents"]


@builder
def with_dropout():
    model = Model(documents_unseen)
    model.head = nn.Sequential(nn.Dropout(0.1), model.head)
    return model, tokens(**PACKED["batch"]), {"causal": True}


@SLOW
def test_dropout_does_not_hide_a_leak():
    (found, *_), facts = examined(with_dropout())
    assert found.kind == "leak"
    assert found.evidence[1].startswith("changing these tokens changes")
    assert facts["unchecked"] == {"padding": "no batch has padding that the doctor knows"}


@SLOW
def test_other_keys_are_healthy():
    assert examined(with_attention(Static))[0] == ()
    assert examined(with_attention(OtherSequence))[0] == ()


@builder
def padded_decoder():
    """Only rows of padding see nothing, in a batch whose tokens are of another length."""

    def attend(q, k, v, decoder_attention_mask):
        valid = decoder_attention_mask.bool()
        pairs = valid[:, None, :, None] & valid[:, None, None]
        return SDPA(q, k, v, attn_mask=torch.where(pairs, 0.0, -1e9))

    class Decoder(Model):
        def forward(self, input_ids, decoder_input_ids, **given):
            return super().forward(decoder_input_ids, **given) + self.embed(input_ids).mean()

    mask = (torch.arange(16) < torch.tensor([[11], [16]])).long()
    more = {"decoder_input_ids": tokens((16,))[0]["input_ids"], "decoder_attention_mask": mask}
    return Decoder(attend), tokens(**more)


def test_rows_of_padding_may_see_nothing():
    assert {x.kind for x in examined(padded_decoder())[0]} == {"dense-mask"}


def test_a_padding_mask_of_another_length_is_named():
    mask = torch.ones(2, LENGTH // 2).long()
    mask[0, 4:] = 0
    _, facts = examined(
        model_of(lambda q, k, v, **_: fused(q, k, v), expected={}, batch={"attention_mask": mask})
    )
    assert facts["unchecked"]["padding"].startswith("attention_mask of shape (2, 12) marks padding")


@SLOW
def test_padding_is_read_from_its_mask():
    _, facts = examined(pooled(mean))
    assert facts["checked"]["padding of input_ids"] == "read from attention_mask"


@builder
def no_attention():
    return nn.Linear(4, 4), [torch.ones(2, 3, 4)]


@SLOW
def test_what_was_not_checked_is_said():
    found, facts = examined(no_attention())
    assert found == ()
    assert "no attention call was seen" in facts["unchecked"]["attention"]
    found, facts = examined(model_of(SDPA, expected={}))
    assert found == ()
    assert facts["unchecked"]["causality"].startswith("not declared, and tokens see later tokens at")
    assert examined(model_of())[1]["checked"]["causality"] == "declared"


# Numbers that hide


@pytest.mark.parametrize(
    ("numbers", "limit"),
    [
        ([0.0, -100.0], -100.0),
        ([0.3, -0.2, -99.8, -100.1, -200.0], -99.8),
        ([0.0, -1e4], HIDDEN),
        ([0.0, -1e9, -torch.inf], HIDDEN),
        ([0.0, -3.0], HIDDEN),
        ([0.5 * -x for x in range(200)], HIDDEN),  # ALiBi
    ],
)
def test_a_gap_tells_masks_from_biases(numbers, limit):
    assert highest_hiding(torch.tensor(numbers)) == pytest.approx(limit)


def test_a_number_hides_only_below_the_models_own_scores():
    mask, q = torch.tensor([[0.0, -30.0]]), torch.ones(1, 1, 1, 4)
    k = torch.tensor([[1.0] * 4, [2.0] * 4])[None, None]
    assert highest_hiding_in(mask, q, k) == -30.0
    assert highest_hiding_in(mask, q * 10, k) == HIDDEN  # The scores differ by 20.


@SLOW
def test_a_small_number_is_no_mask():
    found, _ = examined(model_of(finite_number(-3.0)))
    assert "causality-lost" in grave(found)
    assert not any("Pass is_causal=True, without attn_mask" in x.remedy for x in found)
    assert "full()" not in found_in(written_windows(-3.0), "dense-mask").remedy


# Masks of windows, of copies, and of shared lines


@SLOW
@pytest.mark.parametrize("attend", [fused_windows, float_windows])
def test_windows_with_a_mask_are_examined(attend):
    _, facts = examined(model_of(attend, expected={}))
    assert (
        "q has shape (6, 4, 8, 8), and the module around it receives 24 tokens" in facts["unchecked"]["axes"]
    )
    assert not {"operators", "attention"} & set(facts["unchecked"])


@SLOW
def test_the_mask_of_some_windows_has_no_other_form():
    found = [x for every in (1, 2) for x in examined(written_windows(-100.0, every))[0]]
    assert not any("full()" in x.remedy or "heads hide" in x.tried for x in found)
    assert not any("32,768" in y for x in found for y in x.evidence)


@SLOW
def test_the_number_of_images_does_not_grow_with_the_tokens():
    found, facts = examined(per_image(False))
    (mask,) = (x for x in found if x.kind == "dense-mask")
    assert "for each pair of a query and a key" in mask.what
    assert mask.evidence[0] == "144 B here, 192 KiB at 32,768 tokens"
    assert "changes no result" in facts["checked"]["queries without a key"]


@SLOW
@pytest.mark.parametrize("name", ONE_COPY)
def test_one_copy_of_a_mask_is_no_copy(name):
    ((other,), _) = examined(ONE_COPY[name][1])
    assert "copies" not in "".join(other.evidence)
    assert "one copy" not in other.remedy
    results, wanted = (next(model(**batch) for model, (batch,), _ in (x(),)) for x in ONE_COPY[name])
    assert torch.allclose(results, wanted, atol=1e-6)


@SLOW
def test_a_mask_of_the_batch_may_differ_in_another_batch():
    """In this batch, the samples have the same padding."""

    def attend(q, k, v, attention_mask):
        shown = (attention_mask != 0)[:, None, None].expand(-1, 1, q.shape[2], -1).clone()
        return SDPA(q, k, v, attn_mask=shown)

    valid = (torch.arange(LENGTH) < 20).long().expand(2, -1)
    found, _ = examined(model_of(attend, expected={"causal": False}, batch={"attention_mask": valid}))
    assert all("equal copies" not in y for x in found for y in x.evidence)


def with_graphs(*, training):
    """A prefill and decode steps whose cache keeps the graph of the step before."""
    return kept(in_prefill(by_product), STEPS["decode"][0], frozen=False, training=training)


@SLOW
def test_a_decode_step_behind_a_graph_is_examined_without_gradients():
    found, facts = examined(with_graphs(training=False))
    forms = found_in(with_graphs(training=False), "dense-mask")
    assert {x.kind for x in found} == {"unfused", "dense-mask"}
    assert "is_causal=True, without attn_mask: it would change results of 2 of 3 calls" in forms.tried
    assert facts["checked"]["gradients"] == "the backward pass ran"
    assert facts["unchecked"]["gradients of decode steps"].startswith(
        "a batch is a decode step whose cache holds"
    )
    assert facts["unchecked"]["kept tensors"].startswith("the doctor repeats the step")
    assert "other keys" not in facts["unchecked"]


@SLOW
def test_a_training_step_behind_a_graph_raises():
    found, _ = examined(with_graphs(training=True))
    assert {x.kind for x in found} == {"error", "unfused", "dense-mask"}
    assert "x.detach()" in found[0].remedy
    assert found[0].what.endswith("after they have already been freed)")


class Pooling(nn.Module):
    """One query for all tokens, with a row of scores."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.ones(1, HEADS, 1, SIZE))

    def forward(self, q, k, v):
        return q + written(self.query.expand(len(q), -1, -1, -1), k, v)


@SLOW
def test_one_query_stores_no_scores_of_all_pairs():
    assert examined(model_of(Pooling(), expected={}))[0] == ()


class SharedByBatch(nn.Module):
    """Learned queries, or learned keys and values, of all batch elements. The product copies them."""

    def __init__(self, names):
        super().__init__()
        self.names, self.own = names, nn.Parameter(torch.randn(1, HEADS, LENGTH, SIZE))

    def forward(self, q, k, v):
        given = {"q": q, "k": k, "v": v} | dict.fromkeys(self.names, self.own.expand(len(q), -1, -1, -1))
        return q + v + written(**given)


@SLOW
@pytest.mark.parametrize("names", ["q", "kv"])
def test_tensors_that_batch_elements_share_are_no_copied_keys(names):
    found, _ = examined(model_of(SharedByBatch(names), expected={}))
    assert "unfused" in {x.kind for x in found}
    assert "kv-copy" not in {x.kind for x in found}


def keys_only(number):
    """A mask of keys that is expanded to all queries and heads as a view, bool or floating-point."""

    def attend(q, k, v, attention_mask):
        shown = (attention_mask != 0)[:, None, None]
        mask = shown if number is None else torch.where(shown, 0.0, number)
        return SDPA(q, k, v, attn_mask=mask.expand(len(q), HEADS, LENGTH, LENGTH))

    return attend


@SLOW
@pytest.mark.parametrize("number", [None, -1e9])
def test_a_view_of_a_mask_of_keys_is_not_dense(number):
    attend, batch = keys_only(number), {"attention_mask": (torch.arange(LENGTH) < 20).long().expand(2, -1)}
    found, _ = examined(model_of(attend, expected={"causal": False}, batch=batch))
    assert "dense-mask" not in {x.kind for x in found}


# The time to make a mask


def made_of_one(q, k, v):
    """Each step uses the one before it twice. A sum over both operands would count it 2**8 times."""
    mask = EARLIER.clone()
    for _ in range(8):
        mask = mask & mask.logical_or(mask)
    return SDPA(q, k, v, attn_mask=mask)


def made_in_place(q, k, v):
    mask = torch.zeros(LENGTH, LENGTH)
    for _ in range(40):
        mask.masked_fill_(~EARLIER, -torch.inf)
    return SDPA(q, k, v, attn_mask=mask)


def made_slowly(q, k, v):
    mask = torch.rand(1 << 22).cumsum(0)[: LENGTH**2].view(LENGTH, LENGTH) * 0
    return SDPA(q, k, v, attn_mask=mask.masked_fill(~EARLIER, -torch.inf))


@SLOW
@pytest.mark.parametrize("attend", [made_of_one, made_in_place, made_slowly])
def test_a_masks_share_of_the_time_is_a_share(attend):
    found = found_in(model_of(attend), "dense-mask")
    shares = [int(x) for x in re.findall(r"(\d+)% of all operators' time", found.evidence[1])]
    assert all(1 <= x <= 100 for x in shares)  # A smaller share is not worth a word.
    assert shares or attend is not made_slowly


class Mixed(LearnedBias):
    """Calls of one line, of which one has a mask with a gradient."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def __call__(self, q, k, v):
        return sum(SDPA(q, k, v, attn_mask=[None, self.bias[None]][i]) for i in self.order)


@SLOW
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_of_a_line_that_are_fused_have_no_finding(order):
    (found,) = (x for x in examined(model_of(Mixed(order), expected={}))[0] if x.kind == "unfused")
    assert found.cause.endswith(": the mask requires a gradient")
    assert found.evidence[0].startswith("1 call of the 2 of this line; a tensor of scores")


def in_float32(q, k, v):
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return SDPA(q, k, v, is_causal=True)


@SLOW
def test_the_math_kernel_may_be_chosen():
    (found,) = (x for x in examined(model_of(in_float32))[0] if x.kind == "unfused")
    assert found.cause.startswith("A setting around this call chooses the math kernel")
    assert found.tried.startswith("the call alone runs aten._scaled_dot_product_flash_attention")


def test_a_prefix_is_offered_only_if_a_row_has_one() -> None:
    prefixed = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    assert [text for text, _ in forms(prefixed, Declared())] == ["causal()"]
    prefixed[1, :, :3] = True
    assert [text for text, _ in forms(prefixed, Declared())] == ["causal() | prefix(lengths)"]
