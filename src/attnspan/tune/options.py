"""The options of ``attnspan tune``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnspan.errors import OptionError

if TYPE_CHECKING:
    from attnspan.tune.cases import Case

__all__ = ["Options"]


def _option(panel: str, default: Any, text: str, *names: str) -> Any:
    return field(default=default, metadata={"help": text, "names": names, "panel": panel})


_calls = partial(_option, "Which calls")
_search = partial(_option, "The search")
_cache = partial(_option, "The cache")
_output = partial(_option, "Output")


@dataclass(frozen=True)
class Options:
    """What ``attnspan tune`` was asked for; each field is an option, and its help text is beside it.

    Raises:
        OptionError: A time or a number of threads is not positive.

    Example:
        >>> Options(seconds=0)
        Traceback (most recent call last):
        attnspan.errors.OptionError: --seconds: expected more than 0, got 0. Pass more.
    """

    dtypes: str = _calls("float32,bfloat16", "element types, with commas between")
    head_dims: str = _calls("64,128", "head dims")
    lengths: str = _calls("512,1024,2048,4096,8192", "numbers of keys")
    masks: str = _calls("dense,half,sparse,decode", 'kinds of masks, or masks like "causal & window(99)"')
    modes: str = _calls("forward,backward", "forward, backward, or both")
    heads: int = _calls(8, "heads of a call; fewer where a call would be long")
    threads: int | None = _calls(None, "threads that a call may use; default: torch's number")
    seconds: float = _search(3.0, "for each kind of call, s")
    minutes: float = _search(10.0, "for all of them; the next run goes on with what is left")
    seed: int = _search(0, "of the order of the candidates")
    cache: Path | None = _cache(None, "file; default: ATTNSPAN_TUNE_CACHE, or one in ~/.cache/attnspan")
    dry_run: bool = _cache(False, "search, but write no cache", "--dry-run")
    show: bool = _cache(False, "print the cache in use, and end", "--show")
    clear: bool = _cache(False, "remove the cache in use, and end", "--clear")
    json: Path | None = _output(None, "also write what was gained to this file")
    html: Path | None = _output(None, "also write a page of what was gained")

    def __post_init__(self) -> None:
        for name in ("seconds", "minutes", "threads"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"--{name}", expected="more than 0", got=str(value), remedy="Pass more")

    def cases(self) -> list[Case]:
        """The calls to be tuned.

        Raises:
            OptionError: An option cannot be read.

        Example:
            >>> Options("float32", "64", "256", "half, window(8, 8)", "forward").cases()[1].mask
            'window(8, 8)'
        """
        from attnspan.tune.cases import grid

        return grid(
            _words("modes", self.modes),
            _words("dtypes", self.dtypes),
            _numbers("head-dims", self.head_dims),
            _numbers("lengths", self.lengths),
            _words("masks", self.masks),
            self.heads,
        )


def _words(name: str, text: str) -> list[str]:
    """The parts between commas, but for commas inside parentheses, which belong to a mask."""
    words = [word.strip() for word in re.split(r",(?![^(]*\))", text)]
    if not all(words):
        raise OptionError(
            f"--{name}", expected="words with commas between", got=repr(text), remedy="Leave no word empty"
        )
    return words


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(word) for word in _words(name, text)]
    except ValueError:
        raise OptionError(
            f"--{name}",
            expected="whole numbers with commas between",
            got=repr(text),
            remedy='Write it like "64,128"',
        ) from None
