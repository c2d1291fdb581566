"""Benchmarks: time and memory of attention, compared with the other implementations on this machine."""

__all__: list[str] = []
