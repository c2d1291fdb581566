"""Says what is wrong with a model's attention under the compiler, and proves what is right."""

from .findings import Diagnosis as Diagnosis
from .findings import Finding as Finding
from .places import Place as Place
from .run import diagnose as diagnose

__all__ = ["Diagnosis", "Finding", "Place", "diagnose"]
