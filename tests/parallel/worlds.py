"""Real ranks for tests: processes that joined one gloo group and run the bodies of tests, again and again.

    @ranks(3)
    def test_sums() -> None: ...                       # the body runs on each of three ranks

    parts = world(2).run(attend, cases)                # [result of rank 0, result of rank 1]

A process that loads torch takes seconds, so worlds are shared by all tests and forked from one process that
has loaded it. A body that raises on a rank fails the test with that rank's traceback; a rank that dies or
does not answer fails it too; the world is then ended, and the next test gets a new one.
"""

import atexit
import contextlib
import functools
import inspect
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import few_collections  # noqa: F401
import sending

#: Seconds that a body may take, unless its test says otherwise; a loaded machine is no failure.
SECONDS = 300.0
#: Seconds that one collective may take: the timeout of the process groups.
GROUP_SECONDS = 120.0
#: Seconds in which the other ranks may still answer when one has failed.
GRACE = 1.0

_processes = multiprocessing.get_context("forkserver")
# The compiler too, which takes seconds in each process that compiles, and what test modules import.
_PRELOADED = ["torch.distributed", "torch._functorch.aot_autograd", "attnspan.torch", "train.train"]
_PRELOADED += ["pytest", "hypothesis.strategies"]
_processes.set_forkserver_preload(_PRELOADED)


def preload(*modules: str) -> None:
    """Load further modules once for all ranks to come, unless some have been started already."""
    _PRELOADED.extend(modules)
    _processes.set_forkserver_preload(_PRELOADED)


class RankError(AssertionError):
    """A body failed on some ranks; the message holds what each of them raised."""


@dataclass(frozen=True)
class Died:
    """In place of a result: the rank ended before it answered."""

    exitcode: int


class World:
    """Ranks 0..ranks-1 of one gloo group, each a process with one thread.

    Args:
        ranks: How many.
        group_seconds: Timeout of their process groups.
    """

    def __init__(self, ranks: int, group_seconds: float = GROUP_SECONDS) -> None:
        self.ranks = ranks
        self._folder = tempfile.mkdtemp(prefix="attnspan-world-")
        self._pipes: list[Connection] = []
        self._workers: list[Any] = []
        for rank in range(ranks):
            here, there = _processes.Pipe()
            arguments = (there, rank, ranks, os.path.join(self._folder, "store"), group_seconds)
            worker = _processes.Process(target=_serve, args=arguments)
            worker.start()
            there.close()  # Else the end of the worker would not end its pipe.
            self._pipes.append(here)
            self._workers.append(worker)
        self._wait_until_joined(group_seconds)

    def _wait_until_joined(self, seconds: float) -> None:
        """A body that ends a rank must not meet others that are still on their way into the group."""
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(seconds) or self._receive(rank)[0] != "joined":
                self.close()
                raise RankError(f"rank {rank} of {self.ranks} did not join its group")

    @property
    def alive(self) -> bool:
        return bool(self._workers) and all(worker.is_alive() for worker in self._workers)

    def run(self, body: Callable[..., Any], *arguments: Any, **named: Any) -> list[Any]:
        """Run a function on every rank, with the same arguments.

        Returns:
            The result of each rank.

        Raises:
            RankError: A rank raised, died or did not answer.
        """
        return self.call(body, arguments, named)

    def call(
        self,
        body: Callable[..., Any],
        arguments: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
        seconds: float = SECONDS,
        may_die: tuple[int, ...] = (),
        may_hang: tuple[int, ...] = (),
    ) -> list[Any]:
        """The same where ranks may fail.

        Args:
            body: The function.
            arguments: Those by place.
            named: Those by name.
            seconds: How long the slowest rank may take.
            may_die: Ranks that may end instead of answering; the world ends afterwards.
            may_hang: Ranks that are not waited for; the world ends afterwards.

        Returns:
            The result of each rank, `Died` for one of `may_die` that ended, None for those of `may_hang`.
        """
        __tracebackhide__ = True  # Nothing here says why a body failed.
        request = sending.dumps((body, arguments, named or {}))
        answers: dict[int, tuple[str, Any]] = dict.fromkeys(may_hang, ("returned", None))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # Seen below as a rank that died.
                pipe.send_bytes(request)
        deadline = time.monotonic() + seconds
        while len(answers) < self.ranks and (left := deadline - time.monotonic()) > 0:
            waiting = {self._pipes[rank]: rank for rank in range(self.ranks) if rank not in answers}
            for pipe in wait(list(waiting), timeout=left):
                rank = waiting[pipe]  # type: ignore[index]
                answers[rank] = kind, _ = self._receive(rank)
                if kind == "raised" or (kind == "died" and rank not in may_die):
                    deadline = min(deadline, time.monotonic() + GRACE)
        if may_die or may_hang:
            self.close()
        return self._results(body.__name__, answers, may_die)

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            kind, value = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._workers[rank].join(GRACE)
            return "died", Died(self._workers[rank].exitcode)
        return kind, value

    def _results(self, body: str, answers: dict[int, tuple[str, Any]], may_die: tuple[int, ...]) -> list[Any]:
        __tracebackhide__ = True
        failures = []
        for rank in range(self.ranks):
            kind, value = answers.get(rank, ("silent", "did not answer in time"))
            if kind != "returned" and not (kind == "died" and rank in may_die):
                failures.append(f"rank {rank} of {self.ranks} {kind}: {value}")
        if failures:
            self.close()
            raise RankError(f"{body}\n" + "\n".join(failures))
        return [answers[rank][1] for rank in range(self.ranks)]

    def close(self) -> None:
        """End all ranks, whatever they are doing."""
        for worker in self._workers:
            worker.kill()
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


_worlds: dict[int, World] = {}


def world(ranks: int) -> World:
    """The world of that many ranks that all tests share, started at the first call and after a failure."""
    if ranks not in _worlds or not _worlds[ranks].alive:
        if ranks in _worlds:
            _worlds[ranks].close()
        _worlds[ranks] = World(ranks)
    return _worlds[ranks]


def ranks(
    count: int | Callable[..., int], seconds: float = SECONDS, may_die: tuple[int, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let the body of a function, mostly of a test, run on each rank of a shared world.

    Args:
        count: How many ranks, or what says so from some of the function's arguments, by their names.
        seconds: How long the slowest rank may take.
        may_die: Ranks that may end instead of answering.

    Returns:
        A decorator. The function then returns the results of all ranks, or None where none returns anything.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(body)

        def size(arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
            if isinstance(count, int):
                return count
            given = signature.bind(*arguments, **named).arguments
            return count(**{name: given[name] for name in inspect.signature(count).parameters})

        @functools.wraps(body)
        def on_ranks(*arguments: Any, **named: Any) -> list[Any] | None:
            __tracebackhide__ = True
            found = world(size(arguments, named)).call(body, arguments, named, seconds, may_die)
            return found if any(x is not None for x in found) else None

        return on_ranks

    return decorate


# Registered after multiprocessing's own handler, which waits for all ranks, and so called before it.
@atexit.register
def close_worlds() -> None:
    """End the ranks of all shared worlds."""
    for one in _worlds.values():
        one.close()
    _worlds.clear()


def torchrun(ranks: int | None, *command: object, **options: Any) -> str:
    """What a program prints that torchrun starts on so many ranks; None starts it alone."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *(launch if ranks else []), *map(str, command)],
        **{"env": os.environ | {"OMP_NUM_THREADS": "1"}, "timeout": SECONDS, **options},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _serve(pipe: Connection, rank: int, ranks: int, store: str, group_seconds: float) -> None:
    """The life of one rank: join the group, run bodies, end when the tests end."""
    import torch
    import torch.distributed as dist

    _raise_warnings()
    sending.explain_asserts()
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # As in a process that torchrun starts.
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(ranks)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=group_seconds),
    )
    pipe.send_bytes(pickle.dumps(("joined", None)))
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            os._exit(0)  # The tests are gone; leaving the group in good order would wait for the others.
        answer = sending.answer(request)
        sys.stdout.flush()
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(answer)


def _raise_warnings() -> None:
    """As in the tests' own process; but not those of torch's compiler about torch itself."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
    warnings.filterwarnings("ignore", ".torch.jit.script_method. is deprecated", DeprecationWarning)


@contextlib.contextmanager
def named(case: Any) -> Iterator[None]:
    """Errors of one of many cases say which it was."""
    try:
        yield
    except BaseException as error:  # Also that of `pytest.raises`, where nothing was raised.
        error.add_note(repr(case))
        raise


@contextlib.contextmanager
def raising(pattern: str) -> Iterator[None]:
    """What is raised is, as "Type: text", what the pattern says."""
    try:
        yield
    except Exception as error:
        if not re.match(pattern, f"{type(error).__name__}: {error}", re.DOTALL):
            raise AssertionError(f"expected {pattern}") from error
    else:
        raise AssertionError(f"nothing raised, expected {pattern}")


def error(got: Any, wanted: Any) -> float:
    """Distance of a tensor from another one, relative to the other's norm. For use on ranks."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    return float(((got - wanted).norm() / wanted.norm()).detach())


@functools.cache
def mesh(*sizes: int) -> Any:
    """The device mesh of this rank's world: one axis "cp", or ("inter", "intra"). For use on ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("cp",) if len(sizes) == 1 else ("inter", "intra"))
