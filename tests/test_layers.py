"""Imports point one way; tests/test_one_framework.py imports the package without any framework."""

import ast
import re
from pathlib import Path

import attnspan

PACKAGE = Path(attnspan.__file__).parent

# Lower rooms first. A module may import from its own room and from those below; what is not listed is a
# new room, which must be given its place here.
ROOMS = [
    {"base", "errors"},
    {"masks"},
    {"library"},
    {"call"},
    {"reference"},
    {"_core"},
    {"backends"},
    {"kernels"},
    {"torch", "jax"},
    {"interop"},
    {"parallel"},
    {"xla"},
    {"integrations", "testing", "experimental"},
    {"__main__"},
]
HEIGHT = {room: height for height, rooms in enumerate(ROOMS) for room in rooms}
FRAMEWORKS = {"torch", "jax", "jaxlib", "torch_xla"}
# Public names that a front end shows and a higher room implements; looked up when they are asked for.
FACADES = {
    ("jax/__init__.py", "attnspan.parallel.jax"),
    ("torch/__init__.py", "attnspan.interop.call_jax"),
    ("torch/__init__.py", "attnspan.interop.wrap"),
}


def _modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            yield path, parts


def _imports(path, parts):
    """Absolute dotted names that a module imports, at its top or inside a function."""
    package = ["attnspan", *parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import name` may import a module of that name.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "attnspan" else [module]
            yield from names


def _room(name):
    """The room of a dotted name; of a public name of the package itself, the room that it comes from."""
    parts = name.split(".")
    if parts[0] != "attnspan":
        return None
    if len(parts) == 1:
        return "masks"
    return parts[1] if parts[1] in HEIGHT else "masks"


def _own_room(parts):
    return _room(".".join(["attnspan", *parts]).removesuffix(".__init__"))


def test_every_module_has_a_room():
    homeless = {parts[0] for _, parts in _modules()} - set(HEIGHT)
    assert not homeless, f"give {sorted(homeless)} a place in ROOMS"


def test_imports_point_one_way():
    upward = []
    for path, parts in _modules():
        for name in _imports(path, parts):
            room = _room(name)
            if (path.relative_to(PACKAGE).as_posix(), name) in FACADES:
                continue
            if room is not None and HEIGHT[room] > HEIGHT[_own_room(parts)]:
                upward.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not upward


def _imported_files(path, parts, known):
    """Names of the files that a file imports when it runs, at its top or inside a function."""
    package = ["attnspan", *parts[:-1]]
    tree = ast.parse(path.read_text())
    typed = [x for x in ast.walk(tree) if isinstance(x, ast.If) and "TYPE_CHECKING" in ast.unparse(x.test)]
    for_types = {id(x) for block in typed for x in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = {module, *(f"{module}.{alias.name}" for alias in node.names)}
            yield from names & known


def test_no_file_imports_itself_by_way_of_others():
    files = {".".join(["attnspan", *parts]): (path, parts) for path, parts in _modules()}
    files = {name: x for name, x in files.items() if not name.endswith(".__init__")}
    imports = {name: set(_imported_files(*x, files.keys())) for name, x in files.items()}
    circles = []
    for name in files:
        seen, ahead = set(), [name]
        while ahead:
            ahead += (new := imports[ahead.pop()] - seen)
            seen |= new
        if name in seen:
            circles.append(name)
    assert circles == []


def test_only_the_front_ends_know_a_framework():
    knowing = {"kernels", "torch", "jax", "interop", "parallel", "xla", "integrations", "testing", "__main__"}
    knowing |= {"experimental"}
    # It asks torch about a program that torch records, so torch is loaded then (tests/test_one_framework.py).
    asking = PACKAGE / "base/recorded.py"
    found = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path, parts in _modules()
        for name in _imports(path, parts)
        if name.split(".")[0] in FRAMEWORKS and parts[0] not in knowing and path != asking
    ]
    assert not found


def test_kernels_do_not_import_each_other():
    kernels = {path.stem for path, parts in _modules() if parts[0] == "kernels" and path.stem[0] != "_"}
    for path, parts in _modules():
        if parts[0] == "kernels" and path.stem != "__init__":
            others = {f"attnspan.kernels.{kernel}" for kernel in kernels - {path.stem}}
            assert not others & set(_imports(path, parts)), path


def test_only_the_torch_rooms_register_operators():
    for path, parts in _modules():
        if parts[0] not in ("torch", "interop", "xla"):
            assert not any(name.startswith("torch.library") for name in _imports(path, parts)), path


LAB = PACKAGE.parents[1] / "lab/src/attnspan_lab"
# Lower rooms first, as above; those of a set may not import each other.
LAB_ROOMS = [
    {"files", "console", "children"},
    {"machine", "calibrate"},
    {"bench"},
    {"simulate", "report", "tune"},
    {"zoo"},
    {"doctor"},
    {"cli"},
    {"__main__"},
]


def test_imports_within_the_lab_point_one_way():
    height = {room: i for i, rooms in enumerate(LAB_ROOMS) for room in rooms}
    for path in sorted(LAB.rglob("*.py")):
        parts = path.relative_to(LAB).with_suffix("").parts
        if parts == ("__init__",):
            continue
        for name in _imports(path, parts):
            if name.startswith("attnspan_lab."):
                assert height[name.split(".")[1]] <= height[parts[0]], f"{path} imports {name}"


def test_the_library_does_not_know_the_lab():
    found = [path for path, parts in _modules() if any("attnspan_lab" in x for x in _imports(path, parts))]
    assert not found


PRIVATE = re.compile(
    r"torch\._(C|dynamo|functorch|inductor|library|ops|subclasses|assert_async|check)\b"
    r"|torch\.fx\.experimental|torch\.utils\._|torch\.utils import _"
)
# Rooms below torch look names up where it is loaded; torchtitan's own patch is of a private module.
MAY_BE_PRIVATE = {"torch/compat.py", "base/arrays.py", "base/plain.py", "base/recorded.py", "masks/bounds.py"}


def test_private_names_of_torch_stand_in_one_module():
    found = []
    for path, _ in _modules():
        name = path.relative_to(PACKAGE).as_posix()
        # A docstring's example may use anything.
        lines = (x for x in path.read_text().splitlines() if ">>>" not in x)
        if name not in MAY_BE_PRIVATE and any(PRIVATE.search(x) for x in lines):
            found.append(name)
    assert found == []


def test_one_line_outside_of_it_names_the_experimental_backends():
    lines = [
        (path.relative_to(PACKAGE).as_posix(), line.strip())
        for path, parts in _modules()
        for line in path.read_text().splitlines()
        if parts[0] != "experimental" and "attnspan.experimental" in line
    ]
    assert lines == [("backends.py", 'import_module(f"attnspan.experimental.{framework}_backends")')]
