"""What `make wheel` refuses: archives that lack a file, or hold one that is no part of the package."""

import json
import os
import shutil
from pathlib import Path

import build_wheels
import pytest
from build_wheels import ROOT, check, contents, pinned, sbom, tracked

NAME = "attnspan-0.2.0-cp312-abi3-manylinux_2_28_x86_64.whl"
MODULE = "attnspan/_core.abi3.so"

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(),
    reason="the files of a wheel are those of git",
)


def test_a_wheel_has_the_package_the_module_and_metadata() -> None:
    files = contents(NAME, [MODULE])
    assert {MODULE, "attnspan/py.typed", "attnspan-0.2.0.dist-info/licenses/THIRD_PARTY.txt"} < files
    assert not [x for x in files if x.startswith(("tests", "csrc", "src", "lab"))]
    check(NAME, files, contents(NAME, files))


@pytest.mark.parametrize(
    "stray",
    [
        "attnspan.libs/libgomp-a34b3233.so.1",
        "tests/test_masks.py",
        "attnspan/_core.cpython-312.so",
        "csrc/x.h",
    ],
)
def test_a_file_that_does_not_belong_there_is_named(stray: str) -> None:
    found = contents(NAME, [MODULE]) | {stray}
    with pytest.raises(SystemExit, match=f"not expected .*{Path(stray).name}"):
        check(NAME, found, contents(NAME, sorted(found)))


@pytest.mark.parametrize("lost", [MODULE, "attnspan/errors.py", "attnspan-0.2.0.dist-info/licenses/LICENSE"])
def test_a_missing_file_is_named(lost: str) -> None:
    found = contents(NAME, [MODULE]) - {lost}
    with pytest.raises(SystemExit, match=r"missing \['attnspan"):
        check(NAME, found, contents(NAME, found))


def test_an_sdist_takes_nothing_that_git_ignores() -> None:
    files = tracked()
    assert {"CMakeLists.txt", "csrc/python.cc", "tests/native/memory_check.cc"} < set(files)
    assert not [x for x in files if x.startswith((".venv", "build/", "dist/"))]


@pytest.mark.slow
def test_the_list_of_parts_names_what_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cyclonedx")
    monkeypatch.setitem(os.environ, "SOURCE_DATE_EPOCH", "0")
    file = tmp_path / NAME
    file.write_bytes(b"a wheel")
    text = sbom("attnspan-0.2.0", [file])
    assert text == sbom("attnspan-0.2.0", [file])
    parts = json.loads(text)
    assert {x["name"]: x.get("version") for x in parts["components"]} == {
        "nanobind": pinned("nanobind"),
        "robin-map": None,
        "numpy": None,
    }
    assert parts["metadata"]["component"]["version"] == "0.2.0"


@pytest.mark.parametrize(
    ("wheel", "audited"), [(NAME, [NAME]), (NAME.replace("cp312-abi3", "cp311-cp311"), [])]
)
def test_only_wheels_of_the_stable_abi_are_audited(
    wheel: str, audited: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[str]] = {}

    def made(name: str) -> Path:
        (tmp_path / name).write_text("")
        return tmp_path / name

    def run(tool: str, *arguments: str | Path) -> None:
        asked[tool] = [x.name for x in arguments if isinstance(x, Path)]

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(build_wheels.sys, "argv", ["build_wheels.py", str(tmp_path), "python3"])
    monkeypatch.setattr(build_wheels, "build_sdist", lambda _: made("attnspan-0.2.0.tar.gz"))
    monkeypatch.setattr(build_wheels, "build_wheel", lambda *_: made(wheel))
    monkeypatch.setattr(build_wheels, "sbom", lambda *_: "{}")
    monkeypatch.setattr(build_wheels, "run", run)
    build_wheels.main()
    assert asked.get("abi3audit", []) == audited
    assert ("abi3audit" in asked) == bool(audited)
    assert "attnspan-0.2.0.tar.gz" in (tmp_path / "SHA256SUMS").read_text()
