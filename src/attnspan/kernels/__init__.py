"""Kernels, one file each, and the choice between backends.

A kernel is a module with ``supports(problem) -> None | reason``, a forward and a backward function. Kernels
never import each other. `choose` picks one of a framework's backends, which `attnspan.backends` lists.
"""

from .choice import Choice as Choice
from .choice import Explanation as Explanation
from .choice import SlowPathWarning as SlowPathWarning
from .choice import choose as choose
