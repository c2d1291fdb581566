"""The scripts of docs/scripts.md print what the page shows."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scripts.md").read_text(encoding="utf-8")
SECTION = re.compile(r"```bash\n(?:.*\n)*?python (\S+)(.*)\n(?:.*\n)*?```\n\n```text\n((?:.*\n)*?)```")
SHOWN = {Path(script).stem: (script, options, text) for script, options, text in SECTION.findall(PAGE)}
#: Packages that a script needs besides torch.
NEEDS = {
    "lora_trainer": ("peft", "transformers"),
    "lora_trl": ("peft", "transformers", "trl"),  # `make zoo` installs trl
    "pretrain_packed": ("transformers", "accelerate"),
    "train_flax": ("flax", "optax"),
}
NUMBER = re.compile(r"\d+(?:\.\d+)?")
TIME = re.compile(r"\d+(?:\.\d+)?(?= m?s\b)")


def test_the_page_has_every_script() -> None:
    assert {path.stem for path in (ROOT / "examples/scripts").glob("*.py")} < set(SHOWN)


# In the ordinary run, tests/train trains a GPT, docs/howto/lora.md adapters, and
# tests/integrations/test_accelerate.py a packed Llama. tests/jax/test_flax.py runs flax's modules.
# tests/torch/test_kv_cache.py decodes.
@pytest.mark.long
@pytest.mark.parametrize("name", SHOWN)
def test_a_script_prints_what_the_page_shows(name: str) -> None:
    for package in NEEDS.get(name, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    script, options, shown = SHOWN[name]
    command = [sys.executable, script, *shlex.split(options)]
    variables = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    printed = run.stdout

    def words(text: str) -> str:
        return NUMBER.sub("#", TIME.sub("#", text))

    assert words(printed) == words(shown)
    numbers = [[float(x) for x in NUMBER.findall(TIME.sub("", text))] for text in (printed, shown)]
    # Losses depend on the processor's rounding and on Python's standard library, which is the text.
    assert numbers[0] == pytest.approx(numbers[1], rel=0.1)
