"""After `disable()`, other libraries have their own functions again, by identity."""

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from attnspan.errors import UsageError
from attnspan.integrations._patches import Patches

# Runs in a fresh process, because imports of other tests have enabled the integration.
SAME = """
import inspect, sys

def functions(prefix):
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != prefix:
            continue
        for key, x in list(vars(module).items()):
            if inspect.isclass(x) and x.__module__.partition(".")[0] == prefix:
                found |= {(name, key, attribute): y for attribute, y in vars(x).items() if callable(y)}
            elif inspect.isfunction(x):
                found[name, key] = x
    return found

def changed(before, now):
    return {key[-2:] for key, x in before.items() if now.get(key) is not x}
"""
TRANSFORMERS = """
import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.models.llama import modeling_llama
names = lambda: (set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping))
before, known = functions("transformers"), names()
import attnspan.integrations.transformers as ours
from attnspan.integrations.transformers import disable, enable
patched = functions("transformers")
assert ("PreTrainedModel", "post_init") in changed(before, patched)
assert ("LlamaModel", "forward") in changed(before, patched)
from transformers.models.mistral import modeling_mistral  # it imports patched functions
sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
config = modeling_mistral.MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
config._attn_implementation = "attnspan"
model, tokens = modeling_mistral.MistralForCausalLM(config), torch.ones(1, 3, dtype=int)
wanted = model(tokens).logits
disable()
assert not changed(before, functions("transformers")), changed(before, functions("transformers"))
assert modeling_mistral.create_causal_mask is masking_utils.create_causal_mask
assert not hasattr(modeling_mistral.MistralModel.forward, "attnspan_positions")
assert names() == known
try:
    model(tokens)
except KeyError as error:
    assert "attnspan" in str(error)
else:
    raise AssertionError("the model ran")
disable()  # a second call changes nothing
enable()
enable()
assert AttentionInterface()["attnspan"] is ours.attend
assert torch.equal(model(tokens).logits, wanted)
assert changed(before, functions("transformers")) == changed(before, patched)
disable()
assert not changed(before, functions("transformers"))
"""
DIFFUSERS = """
import diffusers
from diffusers import FluxTransformer2DModel
from diffusers.models import attention_dispatch
names, registry = attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry
state = lambda: (list(names), set(vars(names)), dict(registry._backends), dict(registry._constraints),
                 dict(registry._supported_arg_names), registry._active_backend, set(names._value2member_map_))
before, known = functions("diffusers"), state()
from attnspan.integrations.diffusers import NAME, attend, disable, enable
assert changed(before, functions("diffusers")) >= {("ModelMixin", "set_attention_backend")}
sizes = {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
widths = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
model = FluxTransformer2DModel(**sizes, **widths)
model.set_attention_backend(NAME)
assert registry.get_active_backend()[1] is attend
for _ in range(2):
    disable()
    assert not changed(before, functions("diffusers"))
    assert state() == known, state()
    try:
        model.set_attention_backend(NAME)
    except ValueError as error:
        assert "attnspan" in str(error)
    else:
        raise AssertionError("the name is known")
    assert not enable().layers
    enable()
    model.set_attention_backend(NAME)
    assert registry.get_active_backend() == (names(NAME), attend)
"""


@pytest.mark.slow
def test_libraries_have_their_own_functions_again():
    """One process for both: it loads torch once."""
    programs = {"transformers": TRANSFORMERS, "diffusers": DIFFUSERS}
    there = [code for name, code in programs.items() if find_spec(name)]
    if not there:
        pytest.skip("neither transformers nor diffusers is installed")
    command = [sys.executable, "-W", "ignore", "-c", "".join([SAME, *there])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


class Owner:
    def method(self):
        return 1


def test_undo_restores_attributes_of_classes_and_objects():
    own, thing, patches = vars(Owner)["method"], Owner(), Patches("it")
    patches.apply(lambda: (patches.set(Owner, "method", abs), patches.set(thing, "method", len)))
    patches.apply(lambda: pytest.fail("applied twice"))
    assert (Owner.method, thing.method) == (abs, len)
    patches.undo()
    assert vars(Owner)["method"] is own
    assert vars(thing) == {}


def test_a_failed_patch_leaves_nothing_and_a_later_patch_of_other_code_is_named():
    owner, patches = SimpleNamespace(a=1, b=2), Patches("it")

    def fail():
        patches.set(owner, "a", 2)
        raise ImportError

    with pytest.raises(ImportError):
        patches.apply(fail)
    assert owner.a == 1
    patches.apply(lambda: [patches.set(owner, name, 0) for name in "ab"])
    owner.b = 3
    with pytest.raises(UsageError, match=r"expected it as attnspan patched it, got another patch of b"):
        patches.undo()
    assert vars(owner) == {"a": 0, "b": 3}, "nothing is restored"
    owner.b = 0
    patches.undo()
    assert vars(owner) == {"a": 1, "b": 2}
