"""Counts of a deployment's clients and replies, for the history and the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fedhdp.mechanism import SERVER
from fedhdp.privacy.accounting import format_epsilon
from fedhdp.results.metrics import MetricRow


class MessageCounts:
    """Clients and replies by level."""

    def __init__(self, levels: Iterable[str]):
        self.refused: dict[str, Counter[str]] = {level: Counter() for level in levels}  # of the run, by kind
        self.unsolicited = 0  # replies of the run to messages that were never sent
        self.start_round([])

    def start_round(self, sampled_levels: Iterable[str]) -> None:
        """Begin a round with the levels of all sampled clients, reachable or not."""
        self.sampled = Counter(sampled_levels)
        self.sent, self.replies = Counter[str](), Counter[str]()
        self.absences = Counter[str]()  # clients without a valid reply, by reason

    def rows(self, round: int, epsilon_of: Mapping[str, float]) -> list[MetricRow]:
        """Each group's counts and epsilon."""
        rows = []
        if self.unsolicited:
            rows.append(MetricRow(round, SERVER, "global", "refused: replayed", float(self.unsolicited)))
        for name, epsilon in epsilon_of.items():
            counts = {"sampled": self.sampled[name], "sent": self.sent[name], "replies": self.replies[name]}
            values = counts | {"refused": self.refused[name].total(), "epsilon": epsilon}
            values |= {f"refused: {kind}": count for kind, count in self.refused[name].items()}
            rows += [MetricRow(round, name, "global", metric, float(value)) for metric, value in values.items()]
        return rows

    def format_round(self, epsilon_of: Mapping[str, float]) -> str:
        """The round's counts as one line of the log."""
        parts = [
            f"{name} {self.replies[name]} of {self.sent[name]} sent, epsilon {format_epsilon(epsilon)}"
            for name, epsilon in epsilon_of.items()
        ]
        if self.absences:
            parts.append(", ".join(f"{count} {reason}" for reason, count in sorted(self.absences.items())))
        return "; ".join(parts)
