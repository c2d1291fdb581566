"""One program for rows of any length, as with SDPA: masks ask no length whether it is some number."""

import pytest
import torch
from closeness import relative_error
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

pytest.importorskip("transformers")

from transformers_models import build

import attnspan.integrations.transformers  # noqa: F401

MODELS = {"llama": "AutoModelForCausalLM", "gemma2": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM"}
#: Among them the widths of masks with one interval and with eight, which once were special.
LENGTHS = (12, 20, 4, 18)


class _Logits(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        layers = 2 if name == "gemma2" else 1  # Windows are in every other layer.
        self.model = build(name, MODELS[name], num_hidden_layers=layers).requires_grad_(False)
        self.options = {} if name == "bert" else {"use_cache": False}

    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options).logits


def _inputs(length, padded):
    tokens = {"input_ids": torch.arange(2 * length).reshape(2, length) % 60 + 3}
    valid = torch.ones(2, length, dtype=torch.long)
    valid[0, length - 2 :] = 0
    return {**tokens, "attention_mask": valid} if padded else tokens


def _assert_any_length(model, call, padded, mark=False):
    for length in LENGTHS:
        inputs = _inputs(length, padded)
        valid = inputs.get("attention_mask", torch.ones(2, length)).bool()
        model.model.set_attn_implementation("eager")
        wanted = model(**inputs)[valid]
        model.model.set_attn_implementation("attnspan")
        for x in inputs.values() if mark else ():
            torch._dynamo.mark_dynamic(x, 1)
        assert relative_error(call(**inputs)[valid], wanted) < 3e-6


CASES = pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])


@pytest.mark.slow
@pytest.mark.covering(1)
@CASES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dim", ["named", "auto"])
def test_exported_programs_take_any_length(dim, name, padded):
    model = _Logits(name)
    model.model.set_attn_implementation("attnspan")
    length = Dim("length", min=3, max=100) if dim == "named" else Dim.AUTO
    inputs = _inputs(12, padded)
    program = export(model, (), inputs, dynamic_shapes={x: {1: length} for x in inputs}, strict=False)
    _assert_any_length(model, program.module(), padded)


@pytest.mark.slow
@pytest.mark.covering(1)
@CASES
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mark", [True, False], ids=["marked", "found"])
def test_compiled_models_take_any_length(mark, name, padded):
    model, counter = _Logits(name), CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    _assert_any_length(model, torch.compile(model, fullgraph=True, backend=counter), padded, mark)
    assert counter.frame_count == (1 if mark else 2), "as with SDPA"
