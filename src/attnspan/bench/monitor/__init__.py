"""A hook for a running training: how fast its attention is, and where the time of its steps goes."""

from attnspan.bench.monitor.monitor import Monitor as Monitor

__all__ = ["Monitor"]
