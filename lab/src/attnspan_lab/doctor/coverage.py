"""Record of checks: what each stage examined, and what it could not examine, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Coverage", "checked_in", "unchecked_in"]


@dataclass
class Coverage:
    """Checks of one stage by topic. A check that failed in one batch is not a check that was made.

    Args:
        checked: Result of each check.
        unchecked: Reason for each check that was not possible.
    """

    checked: dict[str, str] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)

    def made(self, topic: str, text: str) -> None:
        """Note a check. The first text stays."""
        self.checked.setdefault(topic, text)

    def missed(self, topic: str, why: str) -> None:
        """Note a check that was not possible. The first reason stays."""
        self.unchecked.setdefault(topic, why)

    def absent(self, topic: str, why: str) -> None:
        """Note that a batch has no data for a check, unless another batch has them."""
        self.missed(f"{topic}?", why)

    @property
    def facts(self) -> dict[str, dict[str, str]]:
        """The record as facts of a stage."""
        unchecked = {k: x for k, x in self.unchecked.items() if not k.endswith("?")}
        for topic, why in self.unchecked.items():
            if topic.endswith("?") and topic[:-1] not in self.checked:
                unchecked.setdefault(topic[:-1], why)
        checked = {k: x for k, x in self.checked.items() if k not in self.unchecked}
        return {"checked": checked, "unchecked": unchecked}


def checked_in(facts: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Collect the checks of all stages by topic. A topic may be checked in one batch and not in another."""
    return {k: x for stage in facts.values() for k, x in stage.get("checked", {}).items()}


def unchecked_in(facts: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Collect the checks that no stage could make, with the reasons."""
    return {k: x for stage in facts.values() for k, x in stage.get("unchecked", {}).items()}
