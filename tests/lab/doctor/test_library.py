"""Models of transformers and diffusers by any name, and similar names for a name that does not exist."""

from __future__ import annotations

import pytest

from attnspan.errors import OptionError
from attnspan_lab.doctor.torch.library import of_library

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


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


def test_a_class_that_cannot_be_built_says_why() -> None:
    with pytest.raises(
        OptionError, match=r"CLIPModel: expected a class that the doctor can build small, got"
    ):
        of_library("CLIPModel")
