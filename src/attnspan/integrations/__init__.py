"""attnspan inside models that others wrote: one module per library, imported by its name."""
