"""Source of a timed region: the statements between two readings of a clock, as a function to call again."""

from __future__ import annotations

import ast
import linecache
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, TypeVar

from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.timing.clocks import Region, Spot, Watch

#: Functions that make inputs, by the last part of their names.
_MAKERS = {
    *("randn", "rand", "randint", "randn_like", "rand_like", "normal", "uniform", "standard_normal"),
    *("device_put", "from_numpy", "as_tensor", "tensor", "asarray", "array", "deepcopy"),
}
_REFUSED: Any = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Nonlocal)
_KEPT, _MADE, _PASS = "_attnspan_kept", "_attnspan_made", "_attnspan_pass"

N = TypeVar("N", bound=ast.AST)


class CannotRepeatError(Exception):
    """The timed statements cannot run again. The message says why."""


@dataclass(frozen=True)
class Body:
    """The statements of a timed region.

    Args:
        place: Line where the timed code begins.
        statements: All statements between the two readings.
        loop: The only loop among them, if there is one.
        variables: Local variables after the last run.
        namespace: Global variables.
        file: File of the statements, for tracebacks.
    """

    place: Place
    statements: tuple[ast.stmt, ...]
    loop: ast.For | ast.While | None
    variables: dict[str, Any] = field(repr=False)
    namespace: dict[str, Any] = field(repr=False)
    file: str

    @property
    def count(self) -> int | None:
        """Number of turns of the loop. 1 without a loop, None if the number is not known."""
        if self.loop is None:
            return 1
        turns: Any = getattr(self.loop, "iter", None)
        is_range = isinstance(turns, ast.Call) and _name(turns.func) == "range"
        if not (is_range or isinstance(turns, ast.Name)):  # Other expressions may change what they read.
            return None
        try:
            code = compile(ast.Expression(turns), self.file, "eval")
            return len(eval(code, self.namespace, self.variables))
        except Exception:  # The user's own variables may have changed.
            return None

    def once(self) -> Body:
        """Return one turn of the loop as a body. Without a known number of turns, return all statements."""
        if self.loop is None or not self.count:
            return self
        return replace(self, statements=tuple(self.loop.body), loop=None)

    def empty(self) -> Body:
        """Return a body with the same variables that does nothing."""
        nothing = ast.If(ast.Constant(False), list(self.statements), [])
        return replace(self, statements=(ast.copy_location(nothing, self.statements[0]),))

    def nodes(self, kind: type[N] | tuple[type[N], ...]) -> list[N]:
        """List the syntax nodes of some types in the statements."""
        return [x for s in self.statements for x in ast.walk(s) if isinstance(x, kind)]

    @property
    def makers(self) -> list[int]:
        """Lines that make inputs."""
        return sorted({x.lineno for x in self.nodes(ast.Call) if _is_maker(x)})

    @property
    def uncalled_waits(self) -> list[int]:
        """Lines that name a function that waits, and do not call it."""
        waits = ("block_until_ready", "synchronize")
        return [x.lineno for x in self.nodes(ast.Expr) if _name(x.value) in waits]

    def calls(self) -> Iterator[tuple[Any, tuple[list[Any], dict[str, Any]] | None]]:
        """Yield each function with a plain name, with its arguments, or None if one of these has none."""
        for node in self.nodes(ast.Call):
            try:
                function = self._value(node.func)
            except Exception:  # Not a plain name, or its value is gone.
                continue
            given = None
            with suppress(Exception):
                arguments = [self._value(x) for x in node.args]
                given = arguments, {x.arg: self._value(x.value) for x in node.keywords if x.arg}
            yield function, given

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        parts = [x for x in ast.walk(node) if not isinstance(x, ast.expr_context)]
        if not all(isinstance(x, ast.Name | ast.Attribute) for x in parts):
            raise CannotRepeatError("not a plain name")
        return eval(compile(ast.Expression(node), self.file, "eval"), self.namespace, self.variables)

    def repeat(self, *, makes_once: bool = False) -> Repeat:
        """Compile the statements into a function of their local variables.

        Args:
            makes_once: Whether the functions that make inputs run in the first call only.

        Raises:
            CannotRepeatError: The statements return, yield or await.
        """
        for refused in self.nodes(_REFUSED):
            raise CannotRepeatError(f"line {refused.lineno} leaves the function")
        if not self.statements:
            raise CannotRepeatError("no statement stands between the two clocks")
        free = {name for x in self.nodes(ast.Global) for name in x.names}
        names = {x.id for x in self.nodes(ast.Name)} & set(self.variables) - free
        keep = _Keep(makes_once)
        copied = [keep.visit(deepcopy(x)) for x in self.statements]
        function = ast.parse(
            f"def timed({', '.join(sorted(names))}):\n"
            f"    for {_PASS} in (None,): pass\n"
            "    return dict(locals())"
        )
        function.body[0].body[0].body = copied  # type: ignore[attr-defined]
        kept: deque[Any] = deque(maxlen=4)
        made: dict[int, Any] = {}
        code = compile(ast.fix_missing_locations(function), self.file, "exec")
        space: dict[str, Any] = {}
        exec(code, {**self.namespace, _KEPT: kept.append, _MADE: _made(made)}, space)
        return Repeat(space["timed"], {x: self.variables[x] for x in names}, kept)


@dataclass
class Repeat:
    """The timed statements as a call without arguments. Variables carry over from call to call.

    Args:
        function: Function of the variables, which returns them.
        variables: Variables that the statements use.
        kept: Last results of expressions whose value the statements drop.
    """

    function: Callable[..., dict[str, Any]]
    variables: dict[str, Any]
    kept: deque[Any]

    def __call__(self) -> list[Any]:
        """Run the statements. Return every value that they compute.

        Raises:
            CannotRepeatError: The statements raise.
        """
        self.kept.clear()
        try:
            after = self.function(**self.variables)
        except Exception as error:  # The user's statements, run once more, may raise anything.
            text = f"line {_line_of(error)} raises {type(error).__name__}: {error}"
            raise CannotRepeatError(text.splitlines()[0]) from error
        after.pop(_PASS, None)
        results = [x for name, x in after.items() if x is not self.variables.get(name)]
        self.variables.update((name, x) for name, x in after.items() if name in self.variables)
        return [*results, *self.kept]


def _line_of(error: Exception) -> int:
    """Return the line of the timed statements in a traceback."""
    trace = error.__traceback__
    return trace.tb_next.tb_lineno if trace is not None and trace.tb_next is not None else 0


class _Keep(ast.NodeTransformer):
    """Keeps the values of expressions, and computes inputs once."""

    def __init__(self, makes_once: bool) -> None:
        self.makes_once = makes_once
        self.count = 0

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        call = ast.Call(ast.Name(_KEPT, ast.Load()), [node.value], [])
        return ast.copy_location(ast.Expr(call), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not (self.makes_once and _is_maker(node)):
            return node
        self.count += 1
        empty = ast.arguments([], [], None, [], [], None, [])
        arguments: list[ast.expr] = [ast.Constant(self.count), ast.Lambda(empty, node)]
        return ast.copy_location(ast.Call(ast.Name(_MADE, ast.Load()), arguments, []), node)


def _made(known: dict[int, Any]) -> Callable[[int, Callable[[], Any]], Any]:
    def made(index: int, make: Callable[[], Any]) -> Any:
        if index not in known:
            known[index] = make()
        return known[index]

    return made


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_maker(node: ast.Call) -> bool:
    return _name(node.func) in _MAKERS


def body_of(region: Region, watch: Watch) -> Body:
    """Find the statements between the two readings of a region, in the innermost frame that holds both.

    Raises:
        CannotRepeatError: No frame holds statements between the two.
    """
    start, stop = region[-1]
    variables = watch.variables(stop)
    outer = {x.frame: x for x in start.stack}
    for spot, (own, space) in zip(stop.stack, variables, strict=True):
        begun = outer.get(spot.frame)
        if begun is None or begun.code is not spot.code:
            continue
        source = watch.sources.get(spot.code) or "".join(linecache.getlines(spot.code.co_filename))
        between = _between(_function(ast.parse(source), spot.code), begun, spot)
        if not between or any(isinstance(x, ast.Yield) for s in between for x in ast.walk(s)):
            continue
        loops = [x for x in between if isinstance(x, ast.For | ast.While)]
        loop = loops[0] if len(loops) == 1 else None
        place = Place(spot.code.co_filename, between[0].lineno, spot.code.co_name)
        if spot.code in watch.sources:  # timeit's code is not the user's. Name the line that calls timeit.
            caller = next((x for x in stop.stack if x.code not in watch.sources), spot)
            place = Place(caller.code.co_filename, caller.line, caller.code.co_name)
        return Body(place, tuple(between), loop, own, space, spot.code.co_filename)
    raise CannotRepeatError("no statement stands between the two clocks")


def _function(tree: ast.Module, code: CodeType) -> Sequence[ast.stmt]:
    """Find the statements of a code object."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
            continue
        if min([node.lineno, *(x.lineno for x in node.decorator_list)]) == code.co_firstlineno:
            return node.body
    return tree.body


def _between(block: Sequence[ast.stmt], start: Spot, stop: Spot) -> list[ast.stmt]:
    """Find the statements that run between two lines of one function."""

    def at(line: int) -> int | None:
        return next((i for i, x in enumerate(block) if x.lineno <= line <= (x.end_lineno or line)), None)

    first, last = at(start.line), at(stop.line)
    if first is None or last is None:
        return []
    if first != last:
        return list(block[first + 1 : last]) if first < last else []
    node = block[first]
    if isinstance(node, ast.With) and start.line == stop.line and start.line < node.body[0].lineno:
        return node.body
    for inner in _blocks(node):
        if found := _between(inner, start, stop):
            return found
        # With one reading in each turn, a sample is the time of the loop's other statements.
        if isinstance(node, ast.For | ast.While) and start.at == stop.at:
            return [x for x in node.body if not x.lineno <= start.line <= (x.end_lineno or x.lineno)]
    return []


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    found = [getattr(node, x, []) for x in ("body", "orelse", "finalbody")]
    return [x for x in (*found, *(x.body for x in getattr(node, "handlers", ()))) if x]
