"""Search: which configuration of a kernel is fastest here, and where that is kept."""

__all__: list[str] = []
