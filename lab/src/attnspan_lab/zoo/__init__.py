"""Every architecture of other libraries, built small, and what becomes of it with each attention."""

__all__: list[str] = []
