"""attnspan inside models that others wrote: one module per library, imported by its name."""

__all__: list[str] = []
