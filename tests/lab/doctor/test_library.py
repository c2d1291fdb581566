"""Models of transformers and diffusers by any name, and similar names for a name that does not exist."""

from __future__ import annotations

import pytest

from attnspan.errors import OptionError
from attnspan_lab.doctor import Diagnosis, Finding, Place, run
from attnspan_lab.doctor.command import _exceeded
from attnspan_lab.doctor.show import rows_of
from attnspan_lab.doctor.torch.library import of_library

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = pytest.mark.slow


@SLOW
@pytest.mark.parametrize(
    ("name", "made", "batches"),
    [
        ("LlamaForCausalLM", "LlamaForCausalLM", 3),
        ("Gemma3ForCausalLM", "Gemma3ForCausalLM", 3),
        ("Bamba", "BambaForCausalLM", 3),
        ("gptj", "GPTJForCausalLM", 3),
        ("LlamaModel", "LlamaModel", 3),
    ],
)
def test_any_class_or_model_type_is_built(name: str, made: str, batches: int) -> None:
    model, plain, more = of_library(name)
    assert (type(model).__name__, len(plain)) == (made, batches)
    assert "labels" not in plain[0] or "ForCausalLM" in made
    assert any("attention_mask" in x for x in more)


@SLOW
@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("LamaForCausalLM", "Did you mean LlamaForCausalLM or"),
        ("FluxTransformerModel", "Did you mean FluxTransformer2DModel or"),
        ("my_own_thing", "Write pkg.module:factory"),
    ],
)
def test_similar_names_are_offered(name: str, similar: str) -> None:
    with pytest.raises(OptionError, match=similar):
        of_library(name)


@SLOW
def test_a_class_that_cannot_be_built_says_why() -> None:
    with pytest.raises(
        OptionError, match=r"CLIPModel: expected a class that the doctor can build small, got"
    ):
        of_library("CLIPModel")


SDPA, T5 = (f"/x/site-packages/transformers/{x}.py" for x in ("integrations/sdpa", "models/t5"))


def test_costs_of_a_library_with_one_remedy_are_one_finding():
    found = [
        Finding(
            "unfused", "Scores are stored", (Place(SDPA, 193),), ("4 calls",), cost=100, tried="it is fused"
        ),
        Finding("dense-mask", "A bias is made", (Place(SDPA, 92), Place(SDPA, 193)), ("9 KiB",), cost=300),
        Finding("dense-mask", "A bias is made", (Place(T5, 338),), ("1 KiB",), cost=20),
        Finding("kv-copy", "Keys are copied", (Place(T5, 9),), cost=10),
        Finding("sync", "A value is read", (Place(T5, 7),)),
        Finding("sync", "A value is read", (Place(T5, 8),)),
        Finding("nan", "NaN", (Place(T5, 5),)),
        Finding("nan", "NaN", (Place(T5, 6),)),
        Finding("dense-mask", "A mask is made", (Place("/x/model.py", 4),)),
        Finding("dense-mask", "A mask is made", (Place("/x/model.py", 5),)),
    ]
    found = run._completed(found, {})
    lines = [[y.places[0].line for y in (x, *x.others)] for x in found]
    assert lines == [[5], [6], [92, 193, 338, 9], [4], [5], [7, 8]]
    costs = found[2]
    assert costs.remedy.startswith(
        "The line is transformers' own. Make the model with attn_implementation=\"att"
    )
    assert [x.tried for x in (costs, *costs.others)] == [""] * 4
    rows = [text for heading, text in rows_of(costs) if heading == "also"]
    assert rows[0].endswith("transformers/integrations/sdpa.py:193  unfused: Scores are stored. 4 calls")
    diagnosis = Diagnosis("x", tuple(found), {"eager": {}})
    assert _exceeded(diagnosis, {"copies": 0}, parity=False) == ["copies: 1, at most 0"]
