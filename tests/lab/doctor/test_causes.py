"""The cause that a finding names is the real one, measured or tried."""

import inspect
import re

import causes
import missed
import pytest
import torch
from patients import Model, tokens

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.findings import KINDS, merged
from attnspan_lab.doctor.torch.stages import STAGES
from attnspan_lab.doctor.torch.subject import Subject

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def examined(factory, stage="eager"):
    found = []
    STAGES[stage](Subject(*factory()), lambda **told: found.append(told.get("finding")), "aot_eager")
    return merged([x for x in found if x is not None])


def line_of(code):
    """Number of the line that is marked."""
    lines, first = inspect.getsourcelines(code)
    return next(first + i for i, x in enumerate(lines) if "# sick" in x)


def kinds(found):
    return [x.kind for x in found if x.severity == "wrong"]


@pytest.mark.parametrize("name", causes.HIDDEN)
def test_what_hidden_queries_get_is_measured(name):
    attend, said = causes.HIDDEN[name]
    found = examined(causes.model_of(attend))
    assert kinds(found) == ["hidden-rows"]
    assert found[0].what.endswith(f"It returns for them{said}")
    assert found[0].places[0].line == line_of(attend)
    assert ("attnspan" in found[0].remedy) == (said != ": 0")


def test_a_query_that_sees_its_own_key_has_no_finding():
    assert kinds(examined(causes.model_of(causes.sees_own))) == []


def exact(attend):
    """Results of valid tokens in float64."""
    model = Model(attend).double()
    with torch.no_grad():
        return model(**tokens(attention_mask=causes.VALID)[0])[causes.VALID.bool()]


@pytest.mark.parametrize("name", causes.PADDING)
def test_why_padding_is_seen(name):
    attend, what, cause, remedy, mended = causes.PADDING[name]
    found = examined(causes.padded(attend))
    assert kinds(found) == ["mask-lost"]
    first = found[0]
    assert first.places[0].line == line_of(attend)
    assert first.what.startswith(what)
    assert cause in first.cause
    assert remedy in first.remedy
    if remedy:
        assert first.tried.endswith("changes no other result")
    assert kinds(examined(causes.padded(mended))) == []
    assert (exact(mended) - exact(causes.hides_keys)).norm() < 1e-9


def test_an_inverted_mask_that_hides_everything_is_named_too():
    found = examined(causes.model_of(causes.inverted_and_causal, attention_mask=causes.VALID))
    assert kinds(found) == ["hidden-rows"]
    assert "True for valid tokens (attention_mask)" in found[0].cause
    found = examined(causes.model_of(causes.inverted, attention_mask=torch.ones_like(causes.VALID)))
    assert found[0].remedy == "Invert the padding mask: pass ~mask"


@pytest.mark.parametrize("name", causes.OVERFLOWS)
def test_an_overflow_names_its_dtype_and_line(name):
    attend, kind, said = causes.OVERFLOWS[name]
    found = examined(causes.model_of(attend, torch.float16, {}))
    assert kinds(found) == [kind]
    assert said in found[0].cause
    assert "largest number is 65504" in found[0].cause
    assert line_of(attend) in [x.line for x in found[0].places]


@pytest.mark.parametrize("attend", [causes.within_range, causes.hidden_by_infinity, causes.narrow_softmax])
def test_masks_within_the_range_of_float16_are_well(attend):
    assert kinds(examined(causes.model_of(attend, torch.float16, {}))) == []


@pytest.mark.parametrize("name", causes.WIDE)
def test_float32_inside_of_a_bfloat16_model_is_counted(name):
    attend, what, size = causes.WIDE[name]
    (found,) = [x for x in examined(causes.model_of(attend, torch.bfloat16)) if x.kind == "upcast"]
    assert found.what.startswith(what)
    assert found.places[0].line == line_of(attend)
    assert any(x.startswith(bytes_text(size)) for x in found.evidence)


def test_a_bfloat16_softmax_is_no_upcast():
    found = examined(causes.model_of(causes.narrow_softmax, torch.bfloat16))
    assert "upcast" not in [x.kind for x in found]


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("name", causes.COPIED)
def test_the_remedy_for_copied_keys_keeps_their_order(name, written_out):
    copied, said = causes.COPIED[name]

    def attend(q, k, v):
        k, v = copied(k), copied(v)
        if written_out:
            return (q @ k.mT).softmax(-1) @ v
        return causes.SDPA(q, k, v, is_causal=True)

    model = Model(attend, kv_heads=2)
    (found,) = [x for x in examined(lambda: (model, tokens(), {})) if x.kind == "kv-copy"]
    assert said in found.remedy
    assert (found.remedy == KINDS["kv-copy"].remedy) == (said == "")
    if found_order := re.search(r"order = (torch.*): call", found.remedy):
        order = eval(found_order[1])
        q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
        wanted = causes.SDPA(q, copied(k), copied(v))
        shared = causes.SDPA(q[:, order], k, v, enable_gqa=True)[:, order.argsort()]
        torch.testing.assert_close(shared, wanted)
        assert not torch.allclose(causes.SDPA(q, k, v, enable_gqa=True), wanted)


@pytest.mark.parametrize("name", causes.TIMED)
def test_a_masks_share_of_the_time_is_a_share(name):
    (found,) = [x for x in examined(causes.model_of(causes.TIMED[name])) if x.kind == "dense-mask"]
    shares = [int(x) for x in re.findall(r"(\d+)% of all operators' time", found.evidence[1])]
    assert all(1 <= x <= 100 for x in shares)  # A smaller share is not worth a word.
    assert shares or name != "made slowly"


@pytest.mark.parametrize("name", causes.CUT)
def test_a_parameter_without_a_gradient_is_found_at_the_line_that_cuts_it(name):
    attend, cause, remedy, tried = causes.CUT[name]
    found = examined(causes.model_of(attend))
    assert kinds(found) == ["no-gradient"]
    assert found[0].what == "2 trainable parameters have no gradient: blocks.0.q.weight, blocks.0.q.bias"
    assert found[0].places[0].line == line_of(attend)
    assert cause in found[0].cause
    assert remedy in found[0].remedy
    assert found[0].tried.startswith(tried)
    assert bool(found[0].tried) == bool(tried)


def test_parameters_that_change_nothing_need_no_gradient():
    assert kinds(examined(causes.model_of(causes.scaled_by_its_size))) == []
    assert kinds(examined(lambda: (causes.Unused(causes.narrow_softmax), tokens(), {}))) == []


@pytest.mark.parametrize("attend", [causes.detached, causes.without_backward])
def test_equal_steps_without_a_gradient_have_parity(attend):
    assert examined(causes.model_of(attend), "parity") == ()


def test_results_that_are_random_in_evaluation_mode_are_not_compared():
    told = []
    STAGES["parity"](Subject(*missed.PAIRS["always"][1]()), lambda **x: told.append(x), "aot_eager")
    assert [x["finding"] for x in told if "finding" in x] == []
    (facts,) = [x["facts"] for x in told if "facts" in x]
    assert facts == {"unchecked": {"compiled results": "the model is random in evaluation mode"}}


def test_a_gradient_that_only_the_compiled_step_has_is_a_fault_of_eager_mode():
    (found,) = examined(causes.model_of(causes.detached_in_eager), "parity")
    assert found.kind == "no-gradient"
    assert found.what.endswith("have a gradient in the compiled step, and none in the eager step")
    assert found.places[0].line == line_of(causes.detached_in_eager)


def test_a_gradient_that_only_the_eager_step_has_is_a_fault_of_the_compiled_step():
    (found,) = examined(causes.model_of(causes.detached_in_compiled), "parity")
    assert found.kind == "parity"
    assert "blocks.0.q.weight" in found.what
    assert found.what.endswith("have a gradient in the eager step, and none in the compiled step")
