"""The doctor for JAX: the same findings from jaxprs, compiled programs and trials."""

from .stages import STAGES as STAGES
from .subject import JaxSubject as JaxSubject

__all__ = ["STAGES", "JaxSubject"]
