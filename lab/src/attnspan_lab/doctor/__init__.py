"""The doctor: finds problems of a model's attention under torch.compile."""

from .findings import Diagnosis as Diagnosis
from .findings import Finding as Finding
from .places import Place as Place
from .run import diagnose as diagnose
from .run import diagnose_benchmark as diagnose_benchmark

__all__ = ["Diagnosis", "Finding", "Place", "diagnose", "diagnose_benchmark"]
