"""The versions of other libraries that adapters take are those that pyproject.toml names."""

import re
from pathlib import Path

import pytest

from attnspan.base import installed as _installed

ROOT = Path(__file__).parents[2]
CALL = re.compile(r'require\(\s*"(\w+)",\s*"[\w.]+",\s*"(\w+)",\s*\("([\d.]+)", "([\d.]+)"\)')
ADAPTERS = sorted((ROOT / "src/attnspan/integrations").glob("[!_]*.py"))


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_an_adapter_takes_the_versions_that_its_extra_brings(path):
    found = CALL.findall(path.read_text(encoding="utf-8"))
    assert path.stem in [module for module, *_ in found]
    for module, extra, first, beyond in found:
        line = re.search(rf"^{extra} = .*$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert f'"{module}>={first},<{beyond}"' in line.group()


@pytest.mark.parametrize("got", ["5.19.3", "6.0.0", "6.0.0.dev0", "4.57"])
def test_another_version_is_refused(monkeypatch, got):
    monkeypatch.setattr(_installed, "version", lambda _: got)
    with pytest.raises(
        ImportError, match=rf"expected numpy of version 5.20 or newer.*got {got}.*attnspan\[x\]"
    ):
        _installed.require("numpy", "attnspan.x", "x", ("5.20", "6"))
    monkeypatch.setattr(_installed, "version", lambda _: "5.23.0rc1")
    _installed.require("numpy", "attnspan.x", "x", ("5.20", "6"))
