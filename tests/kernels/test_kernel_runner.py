"""The stand-in for the compiled module fits it; `make aarch64` and docs/building.md use it."""

import inspect
import re
from importlib import import_module

import pytest
from kernel_runner import Runner


@pytest.mark.compiled_module("it is what the stand-in is compared with")
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_runner_takes_what_the_compiled_module_takes(name: str) -> None:
    signature = getattr(import_module("attnspan._core"), name).__nb_signature__[0][0]
    compiled = re.findall(r"(\w+):", signature.partition(" -> ")[0])
    _, *taken = inspect.signature(getattr(Runner, name)).parameters
    assert len(compiled) >= 8
    assert taken[: len(compiled)] == compiled
