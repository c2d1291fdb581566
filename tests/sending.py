"""Functions of tests that other processes run: pickled as code, also those inside of a test.

Pickle names a function, and the other process imports it. A function inside of another one has no such name,
and that of a test belongs to its decorated form. Here those travel as their code, with what they enclose; the
other process has the module's own names by importing it.
"""

import ast
import importlib
import io
import marshal
import pickle
import sys
import traceback
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from _pytest.assertion.rewrite import rewrite_asserts

_TESTS = str(Path(__file__).parent)


def dumps(value: Any) -> bytes:
    """Pickle what may hold any function of a test."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def answer(request: bytes) -> bytes:
    """Call what `dumps((function, arguments, keywords))` made: ("returned", result) or ("raised", text)."""
    try:
        function, arguments, keywords = pickle.loads(request)
        return pickle.dumps(("returned", function(*arguments, **keywords)))
    except BaseException as error:  # A test is to see whatever it was, even SystemExit.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # Without this frame.
        return pickle.dumps(("raised", "".join(traceback.format_exception(error))))


def explain_asserts() -> None:
    """Let `assert` in modules of the tests say which values it met, as pytest has it in its own process."""
    sys.meta_path.insert(0, _Finder)


class _Finder(PathFinder):
    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = super().find_spec(name, path, target)
        if spec and isinstance(spec.loader, SourceFileLoader) and str(spec.origin).startswith(_TESTS):
            spec.loader = _Loader(name, str(spec.origin))
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        """Compile anew: 50 ms for a long test, once in each process."""
        path = self.get_filename(fullname)
        source = self.get_data(path)
        tree = ast.parse(source)
        rewrite_asserts(tree, source, path)
        return compile(tree, path, "exec", dont_inherit=True)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, types.FunctionType) or _found(value) is value:
            return NotImplemented
        enclosed = tuple(cell.cell_contents for cell in value.__closure__ or ())
        code = marshal.dumps(value.__code__)
        return _function, (
            *(value.__module__, value.__name__, code),
            *(value.__defaults__, value.__kwdefaults__, enclosed),
        )


def _found(function: types.FunctionType) -> Any:
    """What stands where pickle would look for a function."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


def _function(
    module: str, name: str, code: bytes, defaults: Any, keyword_defaults: Any, enclosed: tuple[Any, ...]
) -> Callable[..., Any]:
    names = vars(importlib.import_module(module))
    cells = tuple(map(types.CellType, enclosed))
    function = types.FunctionType(marshal.loads(code), names, name, defaults, cells)
    function.__kwdefaults__ = keyword_defaults
    return function
