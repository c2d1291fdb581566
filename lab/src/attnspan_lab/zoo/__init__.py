"""The zoo: small models of other libraries' architectures, run with each attention."""

__all__: list[str] = []
