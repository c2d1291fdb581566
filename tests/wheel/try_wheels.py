"""Installs the wheels of a folder in bare environments, one after the other, and tries each.

Usage: try_wheels.py FOLDER PYTHON... (`make release`). An environment has a Python, the wheel and at most one
framework; its PATH holds no compiler. If pip does not find a framework, or only a build with CUDA
(gigabytes), the line says NOT TRIED and why.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NEEDS = ("", "torch==2.11.*", "torch==2.13.*", "torch", "jax==0.10.*", "jax==0.11.*")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make")
TRIAL = Path(__file__).with_name("trial.py").resolve()


class NotTried(Exception):
    """An environment cannot be made here."""


def main() -> None:
    folder, *pythons = sys.argv[1:]
    failed = []
    for python in pythons:
        for need in NEEDS:
            name = f"{Path(python).name} {need or 'no framework'}"
            try:
                said = tried(Path(folder).resolve(), python, need)
            except NotTried as reason:
                said = f"NOT TRIED: {reason}"
            except subprocess.CalledProcessError as error:
                failed.append(name)
                said = f"FAILED: {' '.join(map(str, error.cmd))}\n{error.output}"
            print(f"{name}: {said}", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def tried(folder: Path, python: str, need: str) -> str:
    """Make the environment, try the wheel in it, and remove it. Returns what the trial printed."""
    with tempfile.TemporaryDirectory() as place:
        run([python, "-m", "venv", place], os.environ)
        own, environment = f"{place}/bin/python", bare(f"{place}/bin")
        wheel = wheel_for(folder, run([own, "-c", "import sys; print(sys.version_info[1])"], environment))
        framework = need.partition("=")[0]
        options = "--quiet --disable-pip-version-check --only-binary :all:"
        packages = [f"{wheel}[{framework}]", need] if need else [str(wheel)]
        install = [own, "-m", "pip", "install", *options.split(), *packages]
        planned(install, environment)
        run(install, environment)
        run([own, "-I", "-m", "attnspan", "explain", "--env"], environment)
        return run([own, "-I", str(TRIAL), *filter(None, [framework])], environment).strip()


def bare(path: str) -> dict[str, str]:
    """This process's environment with one folder on PATH, and no settings for Python or compilers."""
    there = [x for x in COMPILERS if shutil.which(x, path=path)]
    assert not there, there
    settings = ("PYTHON", "CC", "CXX", "CMAKE", "ATTNSPAN")
    kept = {x: y for x, y in os.environ.items() if not x.startswith(settings)}
    return {**kept, "PATH": path}


def wheel_for(folder: Path, minor: str) -> Path:
    """The wheel of a Python 3.minor: 3.11 has one of its own."""
    (wheel,) = folder.glob("*-cp311-cp311-*.whl" if int(minor) == 11 else "*-cp312-abi3-*.whl")
    return wheel


def planned(install: list[str], environment: dict[str, str]) -> None:
    """Ask pip what it would install. Raises NotTried if a package is not to be had, or not without CUDA."""
    dry = [*install, "--dry-run", "--report", "-"]
    try:
        report = json.loads(run(dry, environment, errors=False))
    except subprocess.CalledProcessError as error:
        raise NotTried("pip finds no packages that fit") from error
    names = [x["metadata"]["name"] for x in report["install"]]
    if any(x.startswith("nvidia") for x in names):
        (torch,) = (x["metadata"]["version"] for x in report["install"] if x["metadata"]["name"] == "torch")
        raise NotTried(f"pip finds torch {torch} with CUDA only")


def run(command: list[str], environment: dict[str, str], errors: bool = True) -> str:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if errors else subprocess.DEVNULL}
    return subprocess.run(command, env=environment, cwd="/", check=True, text=True, **streams).stdout


if __name__ == "__main__":
    main()
