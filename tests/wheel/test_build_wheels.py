"""What `make wheel` refuses: archives that lack a file, or hold one that is no part of the package."""

import json
import shutil
from pathlib import Path

import pytest
from build_wheels import ROOT, check, contents, pinned, sbom, tracked

NAME = "attnspan-0.2.0-cp312-abi3-manylinux_2_28_x86_64.whl"
MODULE = "attnspan/_core.abi3.so"

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(),
    reason="the files of a wheel are those of git",
)


STRAY = ["attnspan.libs/libgomp-a34b3233.so.1", "tests/test_masks.py", "attnspan/_core.cpython-312.so"]
LOST = [MODULE, "attnspan/errors.py", "attnspan-0.2.0.dist-info/licenses/THIRD_PARTY.txt"]


@pytest.mark.parametrize("file", [*STRAY, *LOST])
def test_a_wheel_has_the_package_the_module_and_metadata_alone(file: str) -> None:
    files = contents(NAME, [MODULE])
    check(NAME, files, files)
    found = files ^ {file}
    with pytest.raises(SystemExit, match=r"missing \['attnspan" if file in files else f"expected .*{file}"):
        check(NAME, found, contents(NAME, sorted(found)))


def test_an_sdist_takes_nothing_that_git_ignores() -> None:
    files = tracked()
    assert {"CMakeLists.txt", "csrc/python.cc", "tests/native/memory_check.cc"} < set(files)
    assert not [x for x in files if x.startswith((".venv", "build/", "dist/"))]


@pytest.mark.slow
def test_the_list_of_parts_names_what_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cyclonedx")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    file = tmp_path / NAME
    file.write_bytes(b"a wheel")
    text = sbom("attnspan-0.2.0", [file])
    assert text == sbom("attnspan-0.2.0", [file])
    parts = {x["name"]: x.get("version") for x in json.loads(text)["components"]}
    assert parts == {"nanobind": pinned("nanobind"), "robin-map": None, "numpy": None}
