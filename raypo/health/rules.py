"""All rules on a run's health. Console, report and `raypo doctor RUN` report the same findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raypo.health import processes, texts, updates
from raypo.health.rule import History
from raypo.metrics.catalogue import Row

RULES = (*texts.RULES, *updates.RULES, *processes.RULES)
"""All rules, in the order in which the findings of a step are reported."""


@dataclass(frozen=True)
class Finding:
    """Description of a problem of a run, with its remedy."""

    rule: str
    step: int
    """First step at which the rule matched."""
    text: str
    remedy: str


class Watch:
    """Checker of a run's metrics, step by step. The finding of each rule is reported once."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """Start with an empty history.

        Args:
            config: The resolved config, which some rules use. None means that it is unknown.
        """
        self._config = config or {}
        self._history = History()
        self._left = RULES

    def resume(self, rows: Iterable[Row]) -> None:
        """Replace the history by the rows before a resume. Their findings count as reported."""
        self._history, self._left = History(), RULES
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> list[Finding]:
        """Add the row of a step and return the findings that are new."""
        self._history.add(row)
        step = int(row.get("step", self._history.num_steps))
        results = [(rule, rule.check(self._history, self._config)) for rule in self._left]
        self._left = tuple(rule for rule, texts in results if not texts)
        return [Finding(rule.name, step, *texts) for rule, texts in results if texts]


def findings(rows: Iterable[Row], config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return all findings on a run's metrics, in the order of the steps."""
    watch = Watch(config)
    return [finding for row in rows for finding in watch.add(row)]
