"""A hook for a running training: how fast its attention is, and where the time of its steps goes."""

from attnspan_lab.bench.monitor.monitor import Monitor as Monitor
from attnspan_lab.bench.monitor.probes import AttentionTotals as AttentionTotals

__all__ = ["AttentionTotals", "Monitor"]
