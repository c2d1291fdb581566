"""Energy counters, where the machine shows them to this user."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["PackageCounter", "energy_counter"]

_POWERCAP = Path("/sys/class/powercap")


@dataclass
class PackageCounter:
    """Joules used by the processor packages since the first reading (RAPL), through all overflows.

    Args:
        zones: Folders of the packages.

    Example:
        >>> import tempfile
        >>> zone = Path(tempfile.mkdtemp())
        >>> _ = (zone / "energy_uj").write_text("3000000")
        >>> _ = (zone / "max_energy_range_uj").write_text("5000000")
        >>> counter = PackageCounter((zone,))
        >>> _ = (zone / "energy_uj").write_text("1000000")  # it has overflown
        >>> counter()
        3.0
    """

    zones: tuple[Path, ...]
    _last: list[int] = field(init=False)
    _total: int = 0

    def __post_init__(self) -> None:
        self._last = [_number(zone / "energy_uj") for zone in self.zones]

    def __call__(self) -> float:
        """Joules since the first reading."""
        for index, zone in enumerate(self.zones):
            now = _number(zone / "energy_uj")
            step = now - self._last[index]
            self._total += step if step >= 0 else step + _number(zone / "max_energy_range_uj")
            self._last[index] = now
        return self._total / 1e6


def _number(path: Path) -> int:
    return int(path.read_text())


def energy_counter(device: str) -> tuple[Callable[[], float | None], str]:
    """A counter of joules for a device, and where it comes from.

    Args:
        device: "cpu" or "cuda".

    Returns:
        The counter, which gives None where there is none, and its source or the reason for None.

    Example:
        >>> counter, source = energy_counter("cpu")
        >>> (counter() is None) == source.startswith("not readable")
        True
    """
    return _packages() if device == "cpu" else _nvml()


def _packages() -> tuple[Callable[[], float | None], str]:
    # Zones with one colon are whole packages; deeper ones are parts of them.
    zones = tuple(sorted(zone for zone in _POWERCAP.glob("intel-rapl:*") if zone.name.count(":") == 1))
    if not zones:
        return _nothing, f"not readable: {_POWERCAP} has no package"
    try:
        return PackageCounter(zones), f"RAPL, {len(zones)} packages: everything on the machine counts"
    except (OSError, ValueError) as error:
        return _nothing, f"not readable: {error}"


def _nvml() -> tuple[Callable[[], float | None], str]:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return _nothing, f"not readable: {error}"
    handle, value = ctypes.c_void_p(), ctypes.c_ulonglong()
    calls = (
        library.nvmlInit_v2(),
        library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)),
        library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)),
    )
    if any(calls):
        return _nothing, f"not readable: NVML says {calls}"

    def joules() -> float:
        library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value))
        return value.value / 1e3

    return joules, "NVML, device 0"


def _nothing() -> None:
    return None
