"""What a population has spent, in one SQLite file for all its runs: a round is charged before its result is seen.

A charge is durable when ``charge`` returns, so that a crash may leave a round charged that was never shown, and never
the other way round. Charges only ever grow: rounds run again from an older checkpoint are charged again. A group's
budget is checked in the transaction that charges it, so that runs at the same time cannot pass it together.

How spending is priced is given from outside (``fits``, see ``accounting.within_budget``): this file keeps facts and knows no
epsilon. What it keeps for a group, (noise multiplier, sampling rate, sampler, rounds), is what events are rebuilt from.

Groups are names for ranges of clients. One file holds a name to one range, and a client to one name, so that what a
client has spent is what its group has. A budget can be promised to a name before its first run; it has no clients until
then (0 in the file). Numbers are of one population, which the first run names: another has a file of its own. Restoring
an old copy of the file forgets charges: ``begin`` refuses to resume a run that has completed more rounds than its
ledger knows.

In a deployment clients come and go, and a range cannot say who they are. There each client registers by an identity of
its own, once and for good: the first group it chose is the one it is held to, in all runs of the file. A group may then
grow from run to run; a newcomer inherits what its group has spent, which is never less than its own.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from fedhdp.errors import LedgerError, require
from fedhdp.mechanism import SERVER, Mechanism, PrivacyGroup
from fedhdp.privacy._ledger_db import LedgerFile

PrivacyCost = tuple[float, float, str, int]  # noise multiplier, sampling rate, sampler, rounds: accounting.Spend
Fits = Callable[[Iterable[PrivacyCost], float, float], bool]  # do these stay within (epsilon, delta)?


class BudgetError(LedgerError):
    """A round that would take ``groups`` past their budgets; nothing was charged."""

    def __init__(self, groups: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.groups = groups


class Budget(NamedTuple):
    """What a group may spend in its life."""

    epsilon: float
    delta: float


class Run(NamedTuple):
    """A run, as the ledger knows it."""

    name: str
    started: str
    mechanism: Mechanism
    charged: int


class Ledger(LedgerFile):
    """An open ledger; a context manager. Made where there is none, unless it is to be read only."""

    def __init__(self, path: str | Path, fits: Fits, *, read_only: bool = False, patience: float = 60.0) -> None:
        super().__init__(path, read_only=read_only, patience=patience)
        self._fits = fits

    def begin(
        self,
        run: str,
        mechanism: Mechanism,
        completed: int = 0,
        members: Mapping[str, str] | None = None,
        population: str | None = None,
    ) -> None:
        """Open a run, or resume it: the same mechanism, and a ledger that has charged the rounds already completed.

        ``members`` names the registered clients of the run, each with its group, where a deployment has such;
        ``population`` says in words whose numbers the clients' numbers are, where they are numbered.
        """
        require(run != "", "run", run, "a name")
        text = msgspec.json.encode(mechanism).decode()
        with self._transaction():
            self._refuse_to_bypass_a_promise(mechanism.groups)
            self._refuse_to_mix(registering=members is not None)
            if members is None:
                self._refuse_another_population(population)
                for name, first, clients in _ranges(mechanism):
                    self._admit(name, first, clients)
            else:
                self._admit_members(mechanism, members)
            known = self._db.execute("SELECT mechanism, charged FROM runs WHERE name = ?", (run,)).fetchone()
            if known is None:
                self._db.execute("INSERT INTO runs VALUES (?, ?, ?, 0)", (run, _now(), text))
            elif known[0] != text:
                raise LedgerError(f"{self.path}: run {run!r} is there with another mechanism")
            charged = known[1] if known else 0
            self.refuse_if_older(run, completed, charged)

    def refuse_if_older(self, run: str, completed: int, charged: int) -> None:
        """Refuse to be the ledger of a run that has completed more rounds than are charged here."""
        if charged < completed:
            raise LedgerError(
                f"{self.path}: run {run!r} has completed {completed} rounds, but only {charged} are charged: "
                "this is an older copy of its ledger, or another's"
            )

    def charge(self, run: str, privacy_costs: Mapping[str, PrivacyCost]) -> None:
        """Charge each group for its next rounds, durably, or charge nobody and raise ``BudgetError``.

        A group that goes on without being seen (sampling rate 0) pays nothing and is never refused.
        """
        with self._transaction():
            rounds = max((rounds for _, _, _, rounds in privacy_costs.values()), default=1)
            if not self._db.execute("UPDATE runs SET charged = charged + ? WHERE name = ?", (rounds, run)).rowcount:
                raise LedgerError(f"{self.path}: there is no run {run!r}")
            for name in privacy_costs:
                if not self.clients(name):
                    raise LedgerError(f"{self.path}: group {name!r} has not been in a run")
                self._refuse_another_sampling(name, privacy_costs[name])
            refused = [name for name, spend in privacy_costs.items() if not self._affordable(name, spend)]
            if refused:
                raise BudgetError(tuple(refused), f"{self.path}: another round would pass {self._budgets(refused)}")
            self._db.executemany(
                "INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT"
                ' (run, "group", noise_multiplier, sampling_rate, sampling) DO UPDATE'
                " SET rounds = rounds + excluded.rounds, latest = excluded.latest",
                [(run, name, *_checked(name, spend), _now()) for name, spend in privacy_costs.items()],
            )

    def promise(self, group: str, epsilon: float, delta: float) -> None:
        """Give a group a budget for its life, before its first run or later: it may be lowered, never raised."""
        require(group not in ("", SERVER), "group", group, f"a name, and not {SERVER!r}")
        require(epsilon >= 0, "epsilon", epsilon, "at least 0")
        require(0 < delta < 1, "delta", delta, "between 0 and 1")
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO groups VALUES (?, 0, 0, NULL, NULL)", (group,))
            known = self.budget(group)
            if known and not (epsilon <= known.epsilon and delta <= known.delta):
                raise LedgerError(
                    f"{self.path}: group {group!r} was promised epsilon {known.epsilon:g} at delta {known.delta:g}, "
                    f"which cannot become epsilon {epsilon:g} at delta {delta:g}"
                )
            self._db.execute("UPDATE groups SET epsilon = ?, delta = ? WHERE name = ?", (epsilon, delta, group))

    def tighten(self, group: str, epsilon: float, delta: float) -> None:
        """Promise a group this budget, or as much of it as is stricter than what it was promised before."""
        known = self.budget(group) if group in self.groups() else None
        self.promise(
            group, min(epsilon, known.epsilon) if known else epsilon, min(delta, known.delta) if known else delta
        )

    def register(self, client: str, group: str) -> str:
        """Hold a client to the group it chose, durably; what it is held to is the first group that it ever chose."""
        require(client != "", "client", client, "an identity")
        require(group != "", "group", group, "a name")
        with self._transaction():
            self._refuse_to_mix(registering=True)
            known = self._db.execute('SELECT "group" FROM registrations WHERE client = ?', (client,)).fetchone()
            if known is None:
                self._db.execute("INSERT OR IGNORE INTO groups VALUES (?, 0, 0, NULL, NULL)", (group,))
                self._db.execute("INSERT INTO registrations VALUES (?, ?, ?)", (client, group, _now()))
            return known[0] if known else group

    def registered(self) -> dict[str, str]:
        """Every client that ever registered with the group that it is held to, the oldest first."""
        with self._in_words():
            if self._recognise() < 2:  # read only, and nobody has registered in such a file
                return {}
            return dict(self._db.execute('SELECT client, "group" FROM registrations ORDER BY rowid'))

    def groups(self) -> tuple[str, ...]:
        """The groups that were ever in a run, in the order of their clients, and then those with a promise alone."""
        with self._in_words():
            return tuple(
                name for (name,) in self._db.execute("SELECT name FROM groups ORDER BY clients = 0, first, rowid")
            )

    def clients(self, group: str) -> range:
        """Which clients a group has: none before its first run."""
        with self._in_words():
            row = self._db.execute("SELECT first, clients FROM groups WHERE name = ?", (group,)).fetchone()
        if row is None:
            raise LedgerError(f"{self.path}: there is no group {group!r}")
        return range(row[0], row[0] + row[1])

    def budget(self, group: str) -> Budget | None:
        """What a group may spend in its life, if it was promised anything."""
        with self._in_words():
            row = self._db.execute("SELECT epsilon, delta FROM groups WHERE name = ?", (group,)).fetchone()
        if row is None:
            raise LedgerError(f"{self.path}: there is no group {group!r}")
        return None if row[0] is None else Budget(*row)

    def spent(self, group: str, run: str | None = None) -> tuple[PrivacyCost, ...]:
        """All that a group has spent, over all runs or in one."""
        with self._in_words():
            return tuple(
                self._db.execute(
                    "SELECT noise_multiplier, sampling_rate, sampling, SUM(rounds) FROM charges"
                    ' WHERE "group" = ?1 AND run = COALESCE(?2, run) GROUP BY 1, 2, 3 ORDER BY 1, 2, 3',
                    (group, run),
                )
            )

    def charged(self, beginning: str) -> int:
        """How many rounds are charged in all runs whose names begin so."""
        with self._in_words():
            of_them = "SELECT COALESCE(SUM(charged), 0) FROM runs WHERE substr(name, 1, length(?1)) = ?1"
            return int(self._db.execute(of_them, (beginning,)).fetchone()[0])

    def runs(self) -> tuple[Run, ...]:
        """Every run, the oldest first."""
        with self._in_words():
            rows = self._db.execute(
                "SELECT name, started, mechanism, charged FROM runs ORDER BY started, rowid"
            ).fetchall()
        return tuple(Run(name, at, msgspec.json.decode(text, type=Mechanism), n) for name, at, text, n in rows)

    def _affordable(self, group: str, spend: PrivacyCost) -> bool:
        budget = self.budget(group)
        noise_multiplier, sampling_rate, _, rounds = _checked(group, spend)
        if budget is None or sampling_rate == 0 or noise_multiplier == math.inf or rounds == 0:
            return True
        return self._fits((*self.spent(group), spend), *budget)

    def _budgets(self, groups: list[str]) -> str:
        budgets = [(name, self.budget(name) or Budget(math.inf, 0)) for name in groups]
        return " and ".join(
            f"the budget of {name!r}, epsilon {b.epsilon:g} at delta {b.delta:g}" for name, b in budgets
        )

    def _admit(self, name: str, first: int, clients: int) -> None:
        """Let a group into the file, unless its clients, or its name, are another group's there."""
        known = "SELECT name, first, clients FROM groups WHERE clients > 0"
        for other, start, count in self._db.execute(known).fetchall():
            same = (other, start, count) == (name, first, clients)
            if not same and (other == name or (first < start + count and start < first + clients)):
                raise LedgerError(
                    f"{self.path}: clients {start} to {start + count - 1} are group {other!r} there, "
                    f"so clients {first} to {first + clients - 1} cannot be group {name!r}"
                )
        self._db.execute(
            "INSERT INTO groups VALUES (?, ?, ?, NULL, NULL) ON CONFLICT (name) DO UPDATE"
            " SET first = excluded.first, clients = excluded.clients",
            (name, first, clients),
        )

    def _refuse_to_mix(self, registering: bool) -> None:
        """A file either holds ranges of clients to their groups or registered ones: neither can vouch for the other."""
        held = {name for (name,) in self._db.execute('SELECT DISTINCT "group" FROM registrations')}
        if registering and any(self.clients(name) and name not in held for name in self.groups()):
            raise LedgerError(f"{self.path}: its clients are numbered, so none can register; take another file")
        if held and not registering:
            raise LedgerError(f"{self.path}: its clients have registered, so a run must name its members")

    def _admit_members(self, mechanism: Mechanism, members: Mapping[str, str]) -> None:
        """Let a run have these clients, if each is held to the group that the run has it in."""
        held = self.registered()
        for client, name in members.items():
            if held.get(client) != name:
                raise LedgerError(f"{self.path}: client {client!r} is held to {held.get(client)!r}, not to {name!r}")
        noisy = {group.name for run in self.runs() for group in run.mechanism.groups if not group.opted_out}
        for group in mechanism.groups:
            noise = f"above 0, as in other runs of {self.path}: who registered for {group.name!r} chose some"
            require(not group.opted_out or group.name not in noisy, "noise_multiplier", group.noise_multiplier, noise)
            count = sum(name == group.name for name in members.values())
            require(count == group.clients, f"clients of {group.name!r}", group.clients, f"its {count} members")
        first, names = 0, [name for (name,) in self._db.execute("SELECT name FROM groups ORDER BY rowid")]
        for name in names:
            count = sum(name == group for group in held.values())
            self._db.execute("UPDATE groups SET first = ?, clients = ? WHERE name = ?", (first, count, name))
            first += count

    def expect(self, groups: Iterable[PrivacyGroup]) -> None:
        """Refuse groups, as they chose before any algorithm made something else of them, that pass a promise by."""
        with self._transaction():
            self._refuse_to_bypass_a_promise(tuple(groups))

    def _refuse_another_population(self, population: str | None) -> None:
        """Clients' numbers are of one population: elsewhere the same number is somebody else, in another group maybe."""
        known = self._db.execute("SELECT told FROM population").fetchone()
        if population is not None and known is None:
            self._db.execute("INSERT INTO population VALUES (?)", (population,))
        elif population is not None and known[0] != population:
            raise LedgerError(
                f"{self.path}: its clients are those of {known[0]}, not of {population}; take another file for these"
            )

    def _refuse_another_sampling(self, group: str, spend: PrivacyCost) -> None:
        """What was spent by one way of sampling cannot be added to what is spent by the other."""
        _, _, sampling, _ = spend
        others = {other for _, _, other, _ in self.spent(group)} - {sampling}
        if others:
            raise LedgerError(
                f"{self.path}: {group!r} has spent by {min(others)} sampling, to which rounds of {sampling} sampling "
                "cannot be added; take another file for these"
            )

    def _refuse_to_bypass_a_promise(self, groups: tuple[PrivacyGroup, ...]) -> None:
        """A promise that waits for its group is not passed by under a new name, such as a misspelt one."""
        waiting = [name for name in self.groups() if not self.clients(name) and self.budget(name) is not None]
        absent = sorted(set(waiting) - {group.name for group in groups})
        new = [group.name for group in groups if not group.opted_out and group.name not in self.groups()]
        if absent and new:
            raise LedgerError(
                f"{self.path}: group {absent[0]!r} was promised a budget and has not been in a run, while {new[0]!r} is "
                f"new and was promised none; if they are not the same clients, promise {new[0]!r} a budget too"
            )


def _checked(group: str, spend: PrivacyCost) -> PrivacyCost:
    noise_multiplier, sampling_rate, sampling, rounds = spend
    require(noise_multiplier >= 0, f"noise_multiplier of {group!r}", noise_multiplier, "at least 0")
    require(0 <= sampling_rate <= 1, f"sampling_rate of {group!r}", sampling_rate, "between 0 and 1")
    require(rounds >= 0, f"rounds of {group!r}", rounds, "at least 0")
    return noise_multiplier, sampling_rate, sampling, rounds


def _ranges(mechanism: Mechanism) -> Iterator[tuple[str, int, int]]:
    """Each group's first client and how many they are."""
    first = 0
    for group in mechanism.groups:
        yield group.name, first, group.clients
        first += group.clients


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
