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


def _shown(panel: str, help: str, *names: str) -> dict[str, Any]:
    """What the command line shows of a field; ``names`` where there shall be no --no-name beside --name."""
    return {"panel": panel, "help": help, "names": names}


_calls = partial(_shown, "Which calls")
_search = partial(_shown, "The search")
_cache = partial(_shown, "The cache")
_output = partial(_shown, "Output")


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

    dtypes: str = field(default="float32,bfloat16", metadata=_calls("element types, with commas between"))
    head_dims: str = field(default="64,128", metadata=_calls("head dims"))
    lengths: str = field(default="512,1024,2048,4096,8192", metadata=_calls("numbers of keys"))
    masks: str = field(
        default="dense,half,sparse,decode",
        metadata=_calls('kinds of masks, or masks like "causal & window(99)"'),
    )
    modes: str = field(default="forward,backward", metadata=_calls("forward, backward, or both"))
    heads: int = field(default=8, metadata=_calls("heads of a call; fewer where a call would be long"))
    threads: int | None = field(
        default=None, metadata=_calls("threads that a call may use; default: torch's number")
    )
    seconds: float = field(default=4.0, metadata=_search("for each kind of call, s"))
    minutes: float = field(
        default=12.0, metadata=_search("for all of them; the next run goes on with what is left")
    )
    seed: int = field(default=0, metadata=_search("of the order of the candidates"))
    cache: Path | None = field(
        default=None, metadata=_cache("file; default: ATTNSPAN_TUNE_CACHE, or one in ~/.cache/attnspan")
    )
    dry_run: bool = field(default=False, metadata=_cache("search, but write no cache", "--dry-run"))
    show: bool = field(default=False, metadata=_cache("print the cache in use, and end", "--show"))
    clear: bool = field(default=False, metadata=_cache("remove the cache in use, and end", "--clear"))
    json: Path | None = field(default=None, metadata=_output("also write what was gained to this file"))
    html: Path | None = field(default=None, metadata=_output("also write a page of what was gained"))

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
