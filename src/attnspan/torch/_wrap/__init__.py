"""Someone else's attention function as an operator that compilers, checkpoints and exporters understand."""

from .errors import DeclarationError as DeclarationError
from .wrapped import Wrapped as Wrapped
from .wrapped import wrap as wrap
