"""Kernels, one file each.

A kernel is a module with ``supports(problem) -> None | reason``, a forward and a backward function. Kernels
never import each other.
"""

from .explanation import Explanation as Explanation
from .explanation import SlowPathWarning as SlowPathWarning
