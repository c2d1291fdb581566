"""diffusers' own tests with attnspan in place: a plugin of pytest for a checkout of diffusers.

    git clone --depth 1 https://github.com/huggingface/diffusers && rm -r diffusers/src && cd diffusers
    export PYTHONPATH=/path/to/attnspan/tests/zoo
    pytest -p upstream_diffusers tests/models/transformers -k AttentionBackend
    pytest -p upstream_diffusers --attnspan-everywhere tests/models/transformers -k "not Compile"

Without its sources a checkout tests the installed diffusers. The first command runs their tests of backends
for attnspan. The second puts it into every model before each forward pass, and says at its end how often it
found attention; what fails should fail without the plugin too.
"""

from collections import Counter

import diffusers
import pytest
from torch import nn

import attnspan.integrations.diffusers as adapter
from attnspan.errors import UsageError

counts: Counter[str] = Counter()


def pytest_addoption(parser):
    parser.addoption("--attnspan-everywhere", action="store_true", help="put attnspan into every model")


def pytest_configure(config):
    if config.getoption("--attnspan-everywhere"):
        nn.modules.module.register_module_forward_pre_hook(_enable)
        return
    from tests.models.testing_utils import attention  # of the checkout

    backend = diffusers.models.attention_dispatch.AttentionBackendName(adapter.NAME)
    attention._ALL_BACKEND_PARAMS[:] = [pytest.param(backend, id=adapter.NAME)]


def _enable(module, _):
    if not isinstance(module, diffusers.ModelMixin):
        return
    try:
        counts["attention layers in forward passes"] += len(adapter.enable(module).layers)
        counts["forward passes"] += 1
    except UsageError:
        counts["forward passes of models without attention"] += 1


def pytest_terminal_summary(terminalreporter):
    for what, count in counts.items():
        terminalreporter.write_line(f"attnspan: {count} {what}")
