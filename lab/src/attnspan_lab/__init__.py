"""attnspan-lab: benchmarks, tuner, doctor, monitor and pictures. `attnspan` itself imports none of it."""

__all__: list[str] = []
