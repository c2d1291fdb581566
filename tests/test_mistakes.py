"""What users type by mistake is refused, and the error says how to write it."""

import inspect
import re
import sys

import numpy as np
import pytest
import torch
from samples.mistaken_objects import NO_MASKS, OPERATORS
from samples.mistakes import check, error_of, rows

import attnspan
import attnspan.torch
from attnspan import causal, full, library, segments, window
from attnspan.base.mistakes import REMEDIES

IDS = torch.tensor([[0, 0, 1, 1]])
X = torch.ones(1, 1, 4, 8)
VISIBLE = torch.ones(4, 4, dtype=torch.bool)


def _front_ends():
    jax = pytest.importorskip("attnspan.jax")
    x = sys.modules["jax"].numpy.ones((1, 1, 4, 8))
    return [
        (function, y) for m, y in ((attnspan.torch, X), (jax, x)) for function in (m.attention, m.explain)
    ]


SPANS = causal().spans(4, 4).lowered
NAMES = {"a": attnspan, "lib": library, "np": np, "torch": torch, "mask": causal()}
NAMES |= {"IDS": IDS, "VISIBLE": VISIBLE, "SPANS": SPANS}
MASKS = [
    *(causal(), causal() & segments(IDS), causal() | segments(IDS), causal().prepare(4, 4)),
    *(library.prefix_lm(2), SPANS, causal().spans(4, 4, like=X).lowered),
]
BIASES = [
    attnspan.alibi([0.5, 0.25]),
    attnspan.relative(np.zeros((2, 3), np.float32)),
    attnspan.dense_bias(torch.zeros(4, 4)),
]
ONE_MASK = r"\(.*\)\): expected masks combined by & and \|, .* Write a & b or a \| b"
ONE_BIAS = r"\(.*\)\): expected one bias, .*Test for .* by `bias is None`"


@pytest.mark.parametrize("x", [*MASKS, *BIASES], ids=repr)
def test_masks_spans_and_biases_are_neither_true_nor_false(x):
    for use in (lambda: x and window(2), lambda: x or x, lambda: not x, lambda: 1 if x else 2):
        with pytest.raises(
            TypeError, match=rf"bool\(.*{ONE_BIAS if isinstance(x, attnspan.Bias) else ONE_MASK}"
        ):
            use()


@pytest.mark.parametrize("mistake", rows(OPERATORS), ids=repr)
def test_operators_join_masks_alone(mistake):
    check(error_of(eval(f"lambda: {mistake.code}", NAMES)), mistake)


def test_a_jax_array_next_to_a_mask_is_named():
    visible = pytest.importorskip("jax").numpy.ones((4, 4), bool)
    for use in (lambda: visible & causal(), lambda: causal() | visible):
        with pytest.raises(TypeError, match=r"got \w+ of bool, shape \(4, 4\)\. Wrap booleans"):
            use()


@pytest.mark.parametrize("mistake", rows(NO_MASKS), ids=repr)
def test_what_is_no_mask_is_told_which_mask_it_means(mistake):
    mask = eval(mistake.code, NAMES)
    for function, x in _front_ends():
        check(error_of(lambda function=function, x=x: function(x, x, x, mask=mask)), mistake)


def test_keywords_of_other_libraries_are_refused_with_ours():
    for function, x in _front_ends():
        for name, remedy in REMEDIES.items():
            with pytest.raises(TypeError) as caught:
                function(x, x, x, **{name: None})
            said = f"{function.__name__}(): expected attnspan's keywords, got {name}=. {remedy}."
            assert str(caught.value) == said


#: What a keyword of another library was meant to say; the table has the other spellings of each.
MEANT = """
is_causal mask=causal()
attn_mask mask=from_dense(visible)
cu_seqlens mask=documents(
max_seqlen Leave it out: documents
window_size mask=window(left, right)
sliding_window mask=window(sliding_window - 1)
score_mod softcap=, bias=alibi(slopes)
block_mask mask=from_block_mask(block_mask)
enable_gqa Leave it out: query heads share
key_padding_mask mask=key_padding(lengths)
segment_ids mask=segments(
deterministic the same inputs give the same bits
"""


def test_a_misspelt_keyword_is_given_the_nearest_and_an_unknown_one_the_list():
    for function, x in _front_ends():
        with pytest.raises(TypeError, match=r"no keywords but mask, scale, .*, got maks=\. Write mask=\."):
            function(x, x, x, maks=causal())
        with pytest.raises(TypeError, match=r"got colour=\. Leave it out\."):
            function(x, x, x, colour="red")
    for mistaken, remedy in (("causal", "Pass mask=causal"), ("sclae", "Write scale=")):
        with pytest.raises(TypeError, match=rf"got {mistaken}=\. {remedy}"):
            attnspan.torch.Attention(**{mistaken: True})


def test_remedies_name_what_there_is():
    """No keyword in the table is one of ours, and each keyword and function that a remedy writes is."""
    for line in MEANT.strip().splitlines():
        name, _, words = line.partition(" ")
        assert words in REMEDIES[name]
    for function, _ in _front_ends():
        ours = [x for x in inspect.signature(function).parameters if x != "mistaken"]
        assert not set(ours) & set(REMEDIES)
        for remedy in REMEDIES.values():
            written = {word.split("=")[0].strip("(") for word in remedy.split() if "=" in word}
            assert written <= {*ours, "q_index", "k_index"}, remedy
            assert all(hasattr(attnspan, name) for name in re.findall(r"(\w+)\(", remedy)), remedy


@pytest.mark.slow
def test_no_mask_is_the_full_one():
    torch_x, attention = torch.randn(1, 2, 5, 8), attnspan.torch.attention
    for got in (
        attention(torch_x, torch_x, torch_x, mask=None, softcap=1e9),
        attnspan.torch.Attention(mask=None)(torch_x, torch_x, torch_x),
        attnspan.torch.Attention()(torch_x, torch_x, torch_x, mask=None),
        torch.compile(attention, fullgraph=True, backend="aot_eager")(torch_x, torch_x, torch_x, mask=None),
    ):
        torch.testing.assert_close(got, attention(torch_x, torch_x, torch_x, mask=full()))
    jax = pytest.importorskip("jax")
    for module, x in ((attnspan.torch, torch_x), (attnspan.jax, jax.numpy.asarray(torch_x.numpy()))):
        none, every = (module.attention(x, x, x, mask=mask) for mask in (None, full()))
        assert (none == every).all()
        assert module.explain(x, x, x, mask=None) == module.explain(x, x, x, mask=full())
    assert (jax.jit(lambda y: attnspan.jax.attention(y, y, y, mask=None))(x) == every).all()


def test_explain_takes_all_arguments_of_a_call():
    taken = [set(inspect.signature(function).parameters) for function, _ in _front_ends()]
    assert taken[::2] == taken[1::2]


def test_return_lse_is_read_as_a_truth_value():
    x = torch.randn(1, 1, 4, 8)
    out, lse = attnspan.torch.attention(x, x, x, return_lse=1)
    assert out.shape == x.shape
    assert lse.shape == (1, 1, 4)


def test_a_sharded_mask_is_made_of_one_mask():
    pytest.importorskip("jax")
    from attnspan.parallel import MeshPlan, PlanStack
    from attnspan.parallel.jax import PlacedPlan, Sharded

    for kind in (MeshPlan, PlanStack, Sharded, PlacedPlan):
        x = object.__new__(kind)
        for use in (lambda x=x: x and window(2), lambda x=x: x & window(2), lambda x=x: VISIBLE & x):
            remedy = r"Combine masks by & and \| before they are sharded\. .* by `mask is None`"
            with pytest.raises(TypeError, match=f"{kind.__name__}: expected one mask, .*{remedy}"):
                use()


@pytest.mark.parametrize("name", ["attention", "explain"])
def test_attention_has_the_name_of_a_framework(name):
    with pytest.raises(
        ImportError, match=rf"attnspan\.{name}: expected .* Write `from attnspan\.torch import {name}`"
    ):
        exec(f"from attnspan import {name}", {})
    with pytest.raises(AttributeError, match="has no attribute 'attend'"):
        attnspan.attend  # noqa: B018
