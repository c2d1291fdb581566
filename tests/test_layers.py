"""Rules of the source: imports point one way, no cycles, and names stay where they belong.

tests/test_one_framework.py imports the package without any framework.
"""

import ast
import re
import sys
from collections.abc import Container, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import pytest

import attnspan

PACKAGE = Path(attnspan.__file__).parent
ROOT = Path(__file__).parents[1]

sys.path.append(str(ROOT / "docs"))

from public_modules import MODULES as PUBLIC  # noqa: E402

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
    {"integrations", "testing", "experimental", "interchange"},
    {"__main__"},
]
HEIGHT = {room: height for height, rooms in enumerate(ROOMS) for room in rooms}
FRAMEWORKS = {"torch", "jax", "jaxlib", "torch_xla"}
#: The core names none of the satellites, not even in a string.
CORE = {"base", "errors", "masks", "library", "call", "reference", "kernels", "torch", "jax", "parallel"}
SATELLITES = {"interop", "integrations", "interchange", "xla", "experimental"}
# Public names that a package shows and a higher one implements. They are looked up when they are used.
FACADES = {
    ("attnspan.jax", "attnspan.parallel.jax"),
    ("attnspan.torch", "attnspan.interop"),
    # The registry imports backends, which register there.
    ("attnspan.backends", "attnspan.experimental.jax_backends"),
    ("attnspan.backends", "attnspan.experimental.torch_backends"),
}
#: `__init__` files with a lazy `__getattr__`.
LAZY = {"attnspan", "attnspan.jax", "attnspan.parallel", "attnspan.torch"}
#: Modules that import by a name that is computed. `step` finds a framework's package by the mesh's framework.
COMPUTED = {
    "attnspan.backends",
    "attnspan.base.installed",
    "attnspan.base.lazy",
    "attnspan.interchange._files",
    "attnspan.jax.backends.lazy",
    "attnspan.parallel.step",
}


class Module:
    """A file of a package, by its dotted name."""

    def __init__(self, path: Path, name: str, code: str = "") -> None:
        self.path, self.is_init = path, path.stem == "__init__"
        self.name = name.removesuffix(".__init__")
        self.package = self.name if self.is_init else self.name.rpartition(".")[0]
        self.code = code or path.read_text(encoding="utf-8")
        self.body = ast.parse(self.code).body
        self.nodes = [x for statement in self.body for x in ast.walk(statement)]
        typed = [x for x in self.nodes if isinstance(x, ast.If) and "TYPE_CHECKING" in ast.unparse(x.test)]
        blocks = [x for block in typed if ast.unparse(block.test)[:3] != "not" for x in ast.walk(block)]
        left_out = set(map(id, blocks))
        #: Without imports for type checkers.
        self.running = [x for x in self.nodes if id(x) not in left_out]
        self.imports: set[str] = set()
        self.strings = set(self._strings())

    def _strings(self) -> Iterator[str]:
        with_one = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        firsts = [x.body[0] for x in self.nodes if isinstance(x, with_one)] + self.body[:1]
        skipped = {id(x.value) for x in firsts if isinstance(x, ast.Expr)}
        for x in self.running:
            if isinstance(x, ast.Constant) and isinstance(x.value, str) and id(x) not in skipped:
                yield x.value

    @property
    def room(self) -> str:
        return self.name.partition(".")[2].partition(".")[0]

    @property
    def loads(self) -> list[ast.expr]:
        """The first arguments of calls that import modules by their names."""
        called = [x for x in self.nodes if isinstance(x, ast.Call) and x.args]
        return [x.args[0] for x in called if ast.unparse(x.func).rpartition(".")[2] in LOADING]


class Modules(Mapping[str, Module]):
    """The modules of a package by name. Reading them takes three seconds, so collecting tests reads none."""

    def __init__(self, root: Path, top: str) -> None:
        self.root, self.top = root, top

    @cached_property
    def _read(self) -> dict[str, Module]:
        files = sorted(self.root.rglob("*.py"))
        names = [".".join([self.top, *x.relative_to(self.root).with_suffix("").parts]) for x in files]
        made = [Module(x, name) for x, name in zip(files, names, strict=True)]
        known = {x.name: x for x in made}
        for module in made:
            module.imports = set(_imports(module, known))
        return known

    def __getitem__(self, name: str) -> Module:
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def _imports(module: Module, known: Container[str]) -> Iterator[str]:
    """Dotted names that a module imports, at its top or inside a function: modules where there are some."""
    for node in module.running:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{start}.{alias.name}"
                yield name if name in known or start in ("attnspan", "attnspan_lab") else start


def _room(name: str) -> str | None:
    """The room of a dotted name; of a public name of the package itself, the room that it comes from."""
    parts = name.split(".")
    if parts[0] != "attnspan":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in HEIGHT else "masks"


LOADING = ("import_module", "__import__", "lazy", "_lazy")


def _edges(module: Module, known: dict[str, Module]) -> set[str]:
    """Modules of the package that a module imports. In one that imports by names, a string may be a name."""
    found, loads = set(module.imports), module.loads
    for text in module.strings if loads else ():
        found |= {text, f"{module.package}{text}" if text.startswith(".") else ""}
        found |= {_filled(x, text, module) for x in loads}
    return {x for x in found & known.keys() if x != module.name}


def _filled(name: ast.expr, text: str, module: Module) -> str:
    """A module's name in an f-string, with a string in the place of what is computed."""
    if not isinstance(name, ast.JoinedStr):
        return ""
    own = {"__package__": module.package, "__name__": module.name}
    parts = [
        x.value if isinstance(x, ast.Constant) else own.get(ast.unparse(x.value), text) for x in name.values
    ]
    filled = "".join(map(str, parts))
    return f"{module.package}{filled}" if filled.startswith(".") else filled


SOURCE = Modules(PACKAGE, "attnspan")
OF_LAB = Modules(ROOT / "lab/src/attnspan_lab", "attnspan_lab")


@pytest.mark.slow
@pytest.mark.parametrize("modules", [SOURCE, OF_LAB], ids=["library", "lab"])
def test_no_module_leads_back_to_itself(modules):
    """Over all modules, with `__init__` files and names of modules in strings."""
    left = {
        name: _edges(x, modules) - {to for at, to in FACADES if at == name} for name, x in modules.items()
    }
    # A module that imports none of those that are left is in no cycle.
    while free := {name for name, edges in left.items() if not edges & left.keys()}:
        left = {name: edges for name, edges in left.items() if name not in free}
    assert {name: edges & left.keys() for name, edges in left.items()} == {}, (
        "a cycle, or what leads into one"
    )


def test_names_that_are_computed_stand_in_few_modules():
    """Elsewhere, the test of cycles reads the name of each module that is imported."""

    def is_known(name):
        return isinstance(name, ast.Constant) or ast.unparse(name) == "__name__"

    assert {x.name for x in SOURCE.values() if not all(map(is_known, x.loads))} == COMPUTED


def test_every_module_has_a_room():
    homeless = {x.room for x in SOURCE.values()} - {"", *HEIGHT}
    assert not homeless, f"give {sorted(homeless)} a place in ROOMS"


def test_imports_point_one_way():
    upward = []
    for module in SOURCE.values():
        for name in module.imports | _edges(module, SOURCE) if module.room else ():
            room = _room(name)
            if room and (module.name, name) not in FACADES and HEIGHT[room] > HEIGHT[module.room]:
                upward.append(f"{module.name} imports {name}")
    assert not upward


def test_the_core_does_not_name_its_satellites():
    named, found = re.compile(rf"attnspan\.({'|'.join(SATELLITES)})\b"), set()
    for module in SOURCE.values():
        hits = map(named.search, module.imports | module.strings) if module.room in CORE else ()
        found |= {(module.name, x.group()) for x in hits if x}
    assert found == {x for x in FACADES if x[1].split(".")[1] in SATELLITES - {"experimental"}}


def _naming(package: str) -> set[str]:
    """The modules outside of a package that import it, or name it in a string."""
    others = [x for x in SOURCE.values() if not f"{x.name}.".startswith(f"{package}.")]
    return {x.name for x in others if any(package in y for y in x.imports | x.strings)}


def test_the_registry_alone_names_the_experimental_backends():
    assert _naming("attnspan.experimental") == {"attnspan.backends"}


def test_the_library_does_not_know_the_lab():
    assert _naming("attnspan_lab.") == set()
    assert [x.name for x in SOURCE.values() if "attnspan_lab" in x.imports] == []


def test_only_the_front_ends_know_a_framework():
    knowing = {"kernels", "torch", "jax", "interop", "parallel", "xla", "integrations", "testing", "__main__"}
    knowing |= {"experimental", "interchange"}
    found = {
        module.name
        for module in SOURCE.values()
        if module.room not in knowing and FRAMEWORKS & {x.split(".")[0] for x in module.imports}
    }
    # It asks torch about a program that torch records, so torch is loaded then (tests/test_one_framework.py).
    assert found <= {"attnspan.base.recorded"}


def test_kernels_do_not_import_each_other():
    kernels = {x for x in SOURCE if re.fullmatch(r"attnspan\.kernels\.[a-z]\w*", x)}
    for name, module in SOURCE.items():
        if module.room == "kernels" and module.name != "attnspan.kernels":
            assert not (kernels - {name}) & module.imports, name


def test_only_the_torch_rooms_register_operators():
    for module in SOURCE.values():
        if module.room not in ("torch", "interop", "xla"):
            assert not any(name.startswith("torch.library") for name in module.imports), module.name


# Private names of torch and other libraries.

#: Rooms below torch look names up where it is loaded. FlashAttention's and cuDNN's operators are private.
MAY_BE_PRIVATE = {
    "attnspan.torch.compat",
    "attnspan.base.arrays",
    "attnspan.base.recorded",
    "attnspan.masks.bounds",
    "attnspan.kernels.vendor",
}
#: The one module with private names of each other library.
OF_LIBRARIES = {
    "attnspan.integrations._diffusers_names",
    "attnspan.integrations._transformers_names",
    "attnspan.integrations.accelerate",
    "attnspan.integrations.torchtitan",
    "attnspan.interchange._xformers",
    "attnspan.xla.ops",
}
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NAMED_TUPLES


def _defined(module: Module) -> Iterator[str]:
    """Names that a module defines as functions, classes, arguments, variables or attributes."""
    for x in module.nodes:
        if isinstance(x, ast.FunctionDef | ast.ClassDef):
            yield x.name
        elif isinstance(x, ast.Attribute | ast.Name) and isinstance(x.ctx, ast.Store):
            yield x.attr if isinstance(x, ast.Attribute) else x.id
        elif isinstance(x, ast.Call) and ast.unparse(x.func) == "object.__setattr__":
            yield ast.unparse(x.args[1]).strip("'")
        elif isinstance(x, ast.Dict):
            yield from (str(key.value) for key in x.keys if isinstance(key, ast.Constant))


def _aliases(module: Module) -> dict[str, str]:
    """What each imported name stands for."""
    found = {}
    for x in module.nodes:
        if isinstance(x, ast.Import):
            top = {y.name.partition(".")[0] for y in x.names if not y.asname}
            found |= {y.asname: y.name for y in x.names if y.asname} | {y: y for y in top}
        elif isinstance(x, ast.ImportFrom) and not x.level:
            found |= {y.asname or y.name: f"{x.module}.{y.name}" for y in x.names}
    return found


def _foreign(module: Module, own: set[str]) -> Iterator[str]:
    """Private names that a module uses and the package does not define, also in strings for getattr."""
    aliases = _aliases(module)
    for name in aliases.values():
        if name.startswith("torch.") and any(map(_is_private, name.split("."))):
            yield name
    for x in module.nodes:
        if isinstance(x, ast.Attribute) and _is_private(x.attr):
            root, *rest = ast.unparse(x).split(".")
            name = ".".join([aliases.get(root, root), *rest])
            if name.startswith("torch.") or (root not in ("self", "cls", "super()") and x.attr not in own):
                yield name
        elif isinstance(x, ast.Call) and ast.unparse(x.func) in ("getattr", "hasattr", "setattr", "delattr"):
            text = x.args[1].value if len(x.args) > 1 and isinstance(x.args[1], ast.Constant) else ""
            if _is_private(str(text)) and text not in own:
                yield str(text)


@pytest.mark.slow
def test_private_names_of_libraries_stand_in_one_module_each():
    own: dict[str, set[str]] = {}
    for module in SOURCE.values():
        own.setdefault(_room(module.name), set()).update(_defined(module))
    found = {
        f"{module.name}: {name}"
        for module in SOURCE.values()
        if module.name not in MAY_BE_PRIVATE | OF_LIBRARIES
        for name in _foreign(module, own["base"] | own["masks"] | own[_room(module.name)])
    }
    assert found == set()


#: A line of code => the private name that it uses.
PRIVATE = """
import torch; torch._C.x() => torch._C
from torch import autograd as a; a.function._Single => torch.autograd.function._Single
from torch.autograd import forward_ad; forward_ad._current_level => torch.autograd.forward_ad._current_level
from torch._ops import OpOverload => torch._ops.OpOverload
from torch.distributed import _functional_collectives => torch.distributed._functional_collectives
mesh._flatten() => mesh._flatten
group.backend().options._timeout => group.backend().options._timeout
getattr(x, '_orig_mod', x) => _orig_mod
import torch._dynamo as d => torch._dynamo
"""


def test_each_way_to_a_private_name_is_seen():
    for line in PRIVATE.strip().splitlines():
        code, name = line.split(" => ")
        assert name in set(_foreign(Module(PACKAGE, "attnspan.torch.x", code), {"_own"})), code


# The files that only show names.


def _is_plain(node: ast.stmt, lazy: bool) -> bool:
    """Whether a statement of an `__init__` file imports, or lists names."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test) and all(_is_plain(x, lazy) for x in node.body)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target) in ("__all__", "__version__")
    if isinstance(node, ast.Assign):
        name = ast.unparse(node.targets[0])
        return name == "__all__" or (lazy and (name == "__getattr__" or name.lstrip("_").isupper()))
    return False


def test_init_files_only_show_names():
    for module in SOURCE.values():
        if module.is_init:
            assert all(_is_plain(x, module.name in LAZY) for x in module.body), module.name


def test_only_public_modules_list_their_names():
    """A public module is one that docs/public_modules.py lists. No other has an ``__all__``."""
    listing = {
        module.name
        for module in SOURCE.values()
        for x in module.body
        if isinstance(x, ast.Assign | ast.AnnAssign) and ast.unparse(x).startswith("__all__")
    }
    assert listing == {*PUBLIC}


def test_lazy_packages_are_listed():
    assert {x.name for x in SOURCE.values() if x.is_init and "__getattr__" in x.code} == LAZY


# The lab.

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
    for module in OF_LAB.values():
        for name in module.imports if module.room else ():
            if name.startswith("attnspan_lab."):
                assert height[name.split(".")[1]] <= height[module.room], f"{module.name} imports {name}"


#: Modules whose names the lab uses before they have a public place (2026-11-29). The list may only shrink.
USED_BY_LAB = {
    "attnspan.__main__",
    "attnspan.base.machine",
    "attnspan.experimental",
    "attnspan.kernels",
    "attnspan.library.text",
    "attnspan.masks.bounds",
    "attnspan.masks.expression",
    "attnspan.parallel.auto",
    "attnspan.parallel.cost",
    "attnspan.parallel.partition",
    "attnspan.parallel.strategy",
}


def test_the_lab_uses_public_names():
    found = set()
    for module in OF_LAB.values():
        for x in module.nodes:
            if isinstance(x, ast.ImportFrom) and (x.module or "").partition(".")[0] == "attnspan":
                names = {f"{x.module}.{y.name}" for y in x.names}
                if x.module not in PUBLIC and not names <= {*PUBLIC}:
                    found.add(x.module)
                assert not any(_is_private(y.name) for y in x.names if x.module in PUBLIC), module.name
            elif isinstance(x, ast.Import):
                found |= {y.name for y in x.names if y.name.startswith("attnspan.")} - {*PUBLIC}
    assert found <= USED_BY_LAB
