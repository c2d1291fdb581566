"""Runner of one architecture in its own process. It reports each cell to the parent immediately."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import nn

from attnspan.testing import probe
from attnspan_lab.bench.cells import OURS
from attnspan_lab.bench.devices import Device
from attnspan_lab.bench.timing import LEAST_ROUNDS, Budget, Subject, interleave
from attnspan_lab.children import telling
from attnspan_lab.files import from_plain
from attnspan_lab.zoo.architecture import Architecture
from attnspan_lab.zoo.plan import Key, Settings, plan
from attnspan_lab.zoo.results import Cell, Generation
from attnspan_lab.zoo.step import Outcome, differences, documents_of, in_float64, run_step, take_step
from attnspan_lab.zoo.watch import Backend, Shapes, Watch, profiled

__all__ = [
    "SOURCES",
    "Keeper",
    "architecture_of",
    "collect",
    "left_out",
    "results",
]

#: Library -> module with a function `architectures`.
SOURCES = {name: f"attnspan_lab.zoo.{name}" for name in ("transformers", "diffusers")}
_CACHES = ("dynamic", "static")
_GENERATES = ("decoder", "encoder-decoder", "vision-language")
_PROMPT, _NEW, _PADDED = 12, 8, 4
_LONGEST = 300  # maximum maximum characters of a reason
_MOST_SHAPES = 8  # number of stored (tokens, tokens) shapes, the largest first
_OPERATOR = "attnspan::attention"


def collect(sources: Mapping[str, str], library: str = "") -> list[Architecture]:
    """Collect the architectures of one library or all. Modules of other libraries are not imported."""
    modules = [module for name, module in sources.items() if library in ("", name)]
    return [x for module in modules for x in import_module(module).architectures()]


def left_out(sources: Mapping[str, str], library: str = "") -> dict[str, str]:
    """Collect the families that the modules leave out, with the reasons."""
    found: dict[str, str] = {}
    for name, module in sources.items():
        if library in ("", name):
            found |= getattr(import_module(module), "left_out", dict)()
    return found


class Keeper:
    """Runs the cells of one architecture."""

    def __init__(self, architecture: Architecture, settings: Settings) -> None:
        self.architecture, self.settings = architecture, settings
        self._exact: dict[tuple[str, int], tuple[Outcome, Watch] | None] = {}
        self._reached = 1  # number of shapes that the compiler was given so far

    def layouts(self) -> list[str]:
        """List the requested layouts that the architecture has."""
        return [x for x in self.settings.layouts if self._batch(x, self.settings.tokens[0]) is not None]

    def _batch(self, layout: str, tokens: int, size: str = "tiny") -> dict[str, Any] | None:
        return self.architecture.batch(layout, tokens, size)

    def _given(self, layout: str, tokens: int) -> dict[str, Any]:
        batch = self._batch(layout, tokens)
        assert batch is not None, "`layouts` was asked first"
        # Results are compared, not a loss. However, a decoder may get its tokens from the labels.
        if self.architecture.kind != "encoder-decoder" or "decoder_input_ids" in batch:
            batch.pop("labels", None)
        return batch

    def exact(self, layout: str, tokens: int) -> tuple[Outcome, Watch] | None:
        """Compute results and choices of the eager implementation in float64. None if float64 fails."""
        if (layout, tokens) not in self._exact:
            found = None
            try:
                model: Any = self.architecture.make("eager", "tiny").double()
                if hasattr(model, "set_experts_implementation"):
                    # Grouped products do not support float64.
                    model.set_experts_implementation("eager")
                batch = {k: _double(x) for k, x in self._given(layout, tokens).items()}
                watch = Watch()
                with in_float64(), watch:
                    found = take_step(model, model, batch), watch
            except Exception as error:
                warnings.warn(f"no float64 of {self.architecture.name}: {_short(error)}", stacklevel=2)
            self._exact[layout, tokens] = found
        return self._exact[layout, tokens]

    def run(self, key: Key) -> Cell:
        """Run one cell. A failure becomes the cell's result."""
        cell = Cell(key.implementation, key.mode, key.layout, shapes=key.shapes)
        try:
            model = self.architecture.make(key.implementation, "tiny")
        except Exception as error:
            return replace(cell, failed="build", reason=_short(error), shapes=1)
        measure, self._reached = self._eager if key.mode == "eager" else self._compiled, 1
        try:
            return self._judged(measure(cell, model, backward=True))
        except Exception as error:
            failed = "run" if key.mode == "eager" else "compile"
            first = replace(cell, failed=failed, reason=_short(error), shapes=self._reached)
        # Test whether the forward pass alone runs.
        try:
            found = measure(cell, model, backward=False)
        except Exception:
            return first
        return self._judged(replace(found, backward=False, reason=first.reason))

    def _judged(self, cell: Cell) -> Cell:
        if cell.implementation != OURS or cell.calls:
            return cell
        return replace(cell, failed="unused", reason="attnspan's operator never ran")

    def _eager(self, cell: Cell, model: nn.Module, *, backward: bool) -> Cell:
        # Some models compile parts of themselves, which takes long and is not tested here.
        with torch.compiler.set_stance("force_eager"):
            layout, (first, *more) = cell.layout, self.settings.tokens
            batch, watch, other = self._given(layout, first), Watch(), Watch()
            with watch:
                run_step(model, model, batch, backward=backward)
            if more:
                with other:
                    run_step(model, model, self._given(layout, more[0]), backward=backward)
            outcome, calls, peak = profiled(lambda: take_step(model, model, batch, backward=backward))
            cell = self._compared(cell, model, outcome, watch, backward)
            documents = documents_of(batch) if layout == "packed" else None
            leaks = None
            if documents is not None:
                found = probe(model, batch, documents)
                leaks = "" if found.isolated else _short(found.leaks[0])
            pairs = watch.shapes.of_pairs(other.shapes, first) if more else None
            seconds = self._timed(cell.label, lambda: run_step(model, model, batch, backward=backward))
            cell = replace(cell, peak=peak, seconds=seconds, largest=watch.shapes.largest, leaks=leaks)
            return _counted(cell, calls, pairs)

    def _compared(self, cell: Cell, model: nn.Module, outcome: Outcome, watch: Watch, backward: bool) -> Cell:
        """Add the errors to a cell, at the first number of tokens where rounding changes no choice."""
        for tokens in self.settings.tokens:
            exact = self.exact(cell.layout, tokens)
            if exact is None:
                return cell
            if tokens != self.settings.tokens[0]:
                watch, batch = Watch(), self._given(cell.layout, tokens)
                with watch:
                    outcome = take_step(model, model, batch, backward=backward)
            output, gradient = differences(outcome, exact[0])
            cell = replace(cell, output_error=output, gradient_error=gradient if backward else None)
            if cell.implementation == "identity" or watch.chooses_as(exact[1]):
                return cell
        return replace(cell, ties=True)

    def _compiled(self, cell: Cell, model: nn.Module, *, backward: bool) -> Cell:
        torch._dynamo.reset()
        backend = Backend(self.settings.backend)
        call = torch.compile(model, fullgraph=True, backend=backend)
        shapes, outcomes, start = [], [], time.perf_counter()
        for number, tokens in enumerate(self.settings.tokens[: cell.shapes], 1):
            self._reached, backend.shapes = number, Shapes()
            batch = self._given(cell.layout, tokens)
            outcomes.append(take_step(call, model, batch, backward=backward))
            shapes.append(backend.shapes)
        graphs, seconds = backend.graphs, time.perf_counter() - start
        _, calls, peak = profiled(lambda: run_step(call, model, batch, backward=backward))
        exact = self.exact(cell.layout, self.settings.tokens[0])
        if exact is not None:
            output, gradient = differences(outcomes[0], exact[0])
            cell = replace(cell, output_error=output, gradient_error=gradient if backward else None)
        # To see which tensors grow, the second shape must be compiled as well.
        grows = cell.shapes > 1 and shapes[1].seen
        pairs = shapes[0].of_pairs(shapes[1], self.settings.tokens[0]) if grows else None
        timing = self._timed(cell.label, lambda: run_step(call, model, batch, backward=backward))
        cell = replace(cell, peak=peak, seconds=timing, largest=shapes[0].largest)
        return _counted(replace(cell, graphs=graphs, compile_seconds=seconds), calls, pairs)

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        if not self.settings.seconds:
            return None
        budget = Budget(self.settings.seconds, LEAST_ROUNDS)
        return interleave([Subject(name, call, Device())], budget)[0].execute

    def generation(self, cache: str) -> Generation:
        """Compare greedy generation of a few tokens with one kind of cache."""
        options: dict[str, Any] = {"max_new_tokens": _NEW, "do_sample": False, "pad_token_id": 0}
        if cache == "static":
            options |= {"cache_implementation": "static", "disable_compile": True}
        if self.architecture.kind == "encoder-decoder":
            options["decoder_start_token_id"] = 1
        found = []
        for name in ("eager", OURS):
            try:
                model: Any = self.architecture.make(name, "tiny").eval()
                found.append(model.generate(**self._prompt(), **options).tolist())
            except Exception as error:
                own = name == "eager"
                return Generation(cache, None if own else False, _short(error), own)
        eager, ours = found
        if ours == eager:
            return Generation(cache, equal=True)
        return Generation(cache, equal=False, reason=f"{ours}, eager {eager}"[:_LONGEST])

    def _prompt(self) -> dict[str, Any]:
        """Make a prompt with its other inputs. If there are none, the first row is padded on the left."""
        left = ("labels", "use_cache", "position_ids")
        batch = {
            k: x
            for k, x in self._given("plain", _PROMPT).items()
            if k not in left and not k.startswith("decoder_")
        }
        if set(batch) <= {"input_ids", "attention_mask"}:
            valid = torch.ones_like(batch["input_ids"])
            valid[0, :_PADDED] = 0
            batch["attention_mask"] = valid
        return batch

    def generates(self) -> bool:
        """Whether the architecture generates text."""
        if self.architecture.kind not in _GENERATES or "plain" not in self.layouts():
            return False
        try:
            model: Any = self.architecture.make("eager", "tiny")
            return bool(model.can_generate())
        except Exception:
            return False


def _counted(cell: Cell, calls: Mapping[str, int], pairs: tuple[tuple[int, ...], ...] | None) -> Cell:
    """Add the calls of operators, and the first (tokens, tokens) shapes."""
    kept, others = pairs and pairs[:_MOST_SHAPES], calls.get("aten::scaled_dot_product_attention", 0)
    return replace(cell, calls=calls.get(_OPERATOR, 0), others=others, pairs=kept)


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _short(error: object) -> str:
    """Format an error in one line. The compiler explains its first line on the second line."""
    lines = [x.strip() for x in str(error).splitlines() if x.strip()][:2]
    text = " ".join(lines if len(lines) > 1 and lines[1].startswith("Explanation") else lines[:1])
    named = f"{type(error).__name__}: {text}" if isinstance(error, Exception) else text
    return named[:_LONGEST]


def results(keeper: Keeper, done: Sequence[str]) -> Iterator[tuple[str, Callable[[], Cell | Generation]]]:
    """Yield the remaining cells with labels, and the identity's cells wherever another attention failed."""
    todo, seen = plan(keeper.layouts(), keeper.settings), set(done)

    def cell(key: Key) -> Cell:
        made = keeper.run(key)
        found[key] = made
        return made

    found: dict[Key, Cell] = {}
    for key in todo:
        if (label := f"{key.implementation} {key.mode} {key.layout}") not in seen:
            yield label, lambda key=key: cell(key)  # type: ignore[misc]
    for key in _unexplained(found):
        yield f"{key.implementation} {key.mode} {key.layout}", lambda key=key: cell(key)  # type: ignore[misc]
    if keeper.generates():
        for cache in _CACHES:
            if f"generate {cache}" not in seen:
                yield f"generate {cache}", lambda cache=cache: keeper.generation(cache)  # type: ignore[misc]


def _unexplained(found: dict[Key, Cell]) -> list[Key]:
    """List cells of the identity that show whether a failure comes from the model itself."""
    failed = [
        key
        for key, made in found.items()
        if (made.failed and key.implementation != "identity")
        or (key.implementation == OURS and not made.backward)
    ]
    # Use the number of shapes of the failure. A failure with fewer shapes is enough.
    wanted = {(key.mode, key.layout): 0 for key in failed}
    for key in failed:
        wanted[key.mode, key.layout] = max(wanted[key.mode, key.layout], found[key].shapes)
    known = {(key.mode, key.layout): made for key, made in found.items() if key.implementation == "identity"}
    return [
        Key("identity", *where, shapes)
        for where, shapes in wanted.items()
        if where not in known or (not known[where].failed and known[where].shapes < shapes)
    ]


def architecture_of(task: dict[str, Any]) -> Architecture:
    """Find the architecture of a process's task by sources, library and name."""
    return next(x for x in collect(task["sources"], task["library"]) if x.name == task["name"])


def _main(task: dict[str, Any]) -> None:
    keeper = Keeper(architecture_of(task), from_plain(Settings, task["settings"], "settings"))
    with telling(task["out"]) as tell:
        tell(begin="start")
        for label, work in results(keeper, task["done"]):
            tell(begin=label)
            made = work()
            tell(**{"cell" if isinstance(made, Cell) else "generation": made})
        tell(end=True)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
