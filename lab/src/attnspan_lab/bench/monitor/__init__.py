"""A monitor for a running training: the speed of its attention, and the time of its steps by phase."""

from attnspan_lab.bench.monitor.monitor import Monitor as Monitor
from attnspan_lab.bench.monitor.probes import AttentionTotals as AttentionTotals

__all__ = ["AttentionTotals", "Monitor"]
