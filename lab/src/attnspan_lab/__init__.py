"""The workshop of attnspan: it measures, tunes, diagnoses and draws; attention imports none of it."""

__all__: list[str] = []
