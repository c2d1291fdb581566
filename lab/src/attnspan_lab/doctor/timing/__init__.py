"""Is a benchmark honest? The doctor for measured times."""

from .examine import examine_benchmark as examine_benchmark

__all__ = ["examine_benchmark"]
