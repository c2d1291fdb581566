"""Says at the end what ran on each backend, and what it declares unsupported."""

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    from conformance_backends import BACKENDS

    if not any(backend.ran for backend in BACKENDS.values()):
        return
    terminalreporter.section("conformance")
    for name, backend in BACKENDS.items():
        refused = [backend.missing] if backend.missing else []
        refused += [f"{option}: {reason}" for option, reason in backend.unsupported.items()]
        cells = f"{sum(backend.ran.values())} cells of {len(backend.ran)} options ran"
        terminalreporter.write_line(f"{name}: {cells}; unsupported: {'; '.join(refused) or 'nothing'}")
