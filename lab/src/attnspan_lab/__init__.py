"""What measures, tunes, diagnoses or draws. Nothing on attention's path imports it."""

__all__: list[str] = []
