"""transformers' own tests with attnspan in the place of torch's SDPA.

    .venv/bin/pip install parameterized timeout_decorator
    .venv/bin/python tests/zoo/upstream.py                     # the models of MODELS, in about twenty minutes
    .venv/bin/python tests/zoo/upstream.py llama gemma2        # some of them
    TRANSFORMERS_SOURCE=~/transformers .venv/bin/python tests/zoo/upstream.py

Tests come from a checkout of transformers at the installed version: the one that TRANSFORMERS_SOURCE names,
else a clone in build/upstream. While they run, the name "sdpa", their default, is attnspan's. What
fails runs again with torch's SDPA; what fails then too says nothing of attnspan. The exit status is 1 if
anything else fails, or if attnspan did not run.

pytest loads this file as a plugin too.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODELS = ["llama", "mistral", "gemma3", "deepseek_v3", "bert", "modernbert", "bart", "t5"]
MODELS += ["whisper", "qwen2_5_vl"]
#: What their tests import, besides pytest.
NEEDED = ["parameterized", "timeout_decorator"]
#: Parts of names of tests that are left out, and why.
LEFT_OUT = {
    "output_attentions": "asks for the weights, which attnspan refuses",
    "test_capture_outputs_decorator": "asks for the weights",
    "test_model_outputs_equivalence": "asks for the weights",
    "IntegrationTest": "downloads models",
    "compil": "compiles with Inductor for minutes; tests/integrations has compiled models",
}
REPORT, SWITCH = "ATTNSPAN_UPSTREAM_REPORT", "ATTNSPAN_UPSTREAM"


class InPlace:
    """Puts attnspan in the place of SDPA for a run of pytest, and writes down how it went."""

    def __init__(self) -> None:
        self.ours = os.environ[SWITCH] == "1"
        self.calls, self.outcomes = 0, Counter()
        self.failed: set[str] = set()

    def pytest_configure(self) -> None:
        if not self.ours:
            return
        from transformers import AttentionInterface, AttentionMaskInterface

        import attnspan.integrations.transformers as adapter

        def attend(*args, **kwargs):
            self.calls += 1
            return adapter.attend(*args, **kwargs)

        AttentionInterface.register("sdpa", attend)
        AttentionMaskInterface.register("sdpa", adapter.make_mask)

    def pytest_collection_modifyitems(self, config, items) -> None:
        left_out = [item for item in items if any(part in item.nodeid for part in LEFT_OUT)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        self.outcomes["left out"] = len(left_out)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" or report.skipped:
            self.outcomes[report.outcome] += type(report).__name__ == "TestReport"

    def pytest_sessionfinish(self) -> None:
        found = {"calls": self.calls, "failed": sorted(self.failed), **self.outcomes}
        Path(os.environ[REPORT]).write_text(json.dumps(found))


def pytest_configure(config) -> None:
    """As a plugin of pytest."""
    if REPORT in os.environ:
        plugin = InPlace()
        config.pluginmanager.register(plugin)
        # Registered late, it has missed the call.
        plugin.pytest_configure()


def source() -> Path:
    """A checkout of transformers at the installed version."""
    import transformers

    given = os.environ.get("TRANSFORMERS_SOURCE")
    if given:
        return Path(given).expanduser().resolve()
    path = ROOT / "build" / "upstream" / f"transformers-{transformers.__version__}"
    if not path.exists():
        address, tag = "https://github.com/huggingface/transformers", f"v{transformers.__version__}"
        subprocess.run(["git", "clone", "--depth", "1", "--branch", tag, address, str(path)], check=True)
    return path


def run(checkout: Path, tests: list[str], ours: bool) -> dict:
    """Run tests in a process of their own; what `InPlace` wrote down."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        own = {
            REPORT: report.name,
            SWITCH: str(int(ours)),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        options = ["-p", "upstream", "-p", "no:cacheprovider", "-q", "--tb=short"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=checkout,
            env={**os.environ, **own},
            check=False,
        )
        text = report.read()
    return json.loads(text) if text else {"calls": 0, "failed": ["pytest itself"]}


def main(models: list[str]) -> int:
    """Run the tests of models, print a line for each, and name what failed because of attnspan."""
    checkout, broken, lines = source(), [], []
    for model in models or MODELS:
        found = run(checkout, [f"tests/models/{model}/test_modeling_{model}.py"], ours=True)
        theirs = set(run(checkout, found["failed"], ours=False)["failed"]) if found["failed"] else set()
        mine = [test for test in found["failed"] if test not in theirs]
        broken += mine if found["calls"] else [*mine, f"{model}: attnspan never ran"]
        row = [model, found.get("passed", 0), len(mine), len(found["failed"]) - len(mine)]
        lines.append([*row, found.get("skipped", 0), found.get("left out", 0), found["calls"]])
    heads = ["model", "passed", "failed", "fail with SDPA too", "skipped", "left out", "calls of attnspan"]
    print(*("  ".join(map(str, line)) for line in [heads, *lines]), *broken, sep="\n")
    return bool(broken)


if __name__ == "__main__":
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        sys.exit(f"transformers' tests need {names}. Run {sys.executable} -m pip install {names}")
    sys.exit(main(sys.argv[1:]))
