"""The ledger: what every group has been charged, in one SQLite file for all runs of a population.

A round is charged before its result is seen, and a charge is durable when ``charge`` returns. A crash may leave a round
charged that was never shown, never the other way round. Charges only grow: a round that is run again from an older
checkpoint is charged again. A group's budget is checked, by Renyi accounting, in the transaction that charges the group,
so concurrent runs cannot exceed it together. The file stores facts, not epsilons: noise multiplier, sampling rate,
sampling and number of rounds, from which the events of accounting are rebuilt.

In simulations a group is a name for a range of client numbers. A file maps each name to one range and each client to one
name, so a client's cost is its group's. A budget can be promised to a name before its first run; the name has no clients
until then (0 in the file). Client numbers belong to one population, which the first run names; another population needs
another file. ``begin`` refuses to resume a run that has completed more rounds than the file has charged, as happens when
an old copy of the file was restored.

In deployments clients join and leave, and no range can describe them. There each client registers once under an identity
of its own, and stays in the group of its first registration in all runs of the file. A group may grow from run to run: a
client that joins inherits the group's cost, which is never less than the client's own.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from fedhdp.errors import LedgerError, require
from fedhdp.mechanism import SERVER, Mechanism, PrivacyGroup
from fedhdp.privacy._ledger_db import LedgerFile
from fedhdp.privacy.accounting import PrivacyCost, within_budget


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The epsilon that a group may reach over all runs of a ledger, at a delta."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        require(self.epsilon >= 0, "epsilon", self.epsilon, "at least 0")
        require(0 < self.delta < 1, "delta", self.delta, "between 0 and 1")

    def lowered(self, other: Budget | None) -> Budget:
        """This budget with the epsilon and the delta of another where they are smaller."""
        return self if other is None else Budget(min(self.epsilon, other.epsilon), min(self.delta, other.delta))

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} at delta {self.delta:g}"


class BudgetError(LedgerError):
    """A charge that would exceed the budgets of ``groups``; nothing was charged."""

    def __init__(self, message: str, groups: tuple[str, ...]) -> None:
        super().__init__(message, "budget", groups)
        self.groups = groups


class Run(NamedTuple):
    """A run in the ledger."""

    name: str
    started: str
    mechanism: Mechanism
    charged: int


class Ledger(LedgerFile):
    """An open ledger, also a context manager that closes it.

    Args:
        path: The file; created unless ``read_only``.
        read_only: Open an existing file for reading alone.
        timeout: For how many seconds to wait while another process holds the file.

    Raises:
        LedgerError: If the file cannot be opened, or is no ledger.
    """

    def begin(
        self,
        run: str,
        mechanism: Mechanism,
        completed: int = 0,
        members: Mapping[str, str] | None = None,
        population: str | None = None,
    ) -> None:
        """Open a run, or resume it.

        Args:
            run: The name of the run.
            mechanism: Its mechanism; when the run is resumed, the same.
            completed: The rounds that the run has completed.
            members: In a deployment, the registered clients of the run with their groups.
            population: In a simulation, a description of the population whose client numbers these are.

        Raises:
            LedgerError: If the run has another mechanism or fewer charged than completed rounds in this file, if its
                clients belong to other groups or to another population, or if a promised budget would be bypassed.
        """
        require(run != "", "run", run, "a name")
        encoded = msgspec.json.encode(mechanism).decode()
        with self._transaction():
            self._check_promises(mechanism.groups)
            self._check_client_kind(registering=members is not None)
            if members is None:
                self._check_population(population)
                for name, clients in _client_ranges(mechanism):
                    self._admit_range(name, clients)
            else:
                self._admit_members(mechanism, members)
            row = self._db.execute("SELECT mechanism, charged FROM runs WHERE name = ?", (run,)).fetchone()
            if row is None:
                self._db.execute("INSERT INTO runs VALUES (?, ?, ?, 0)", (run, _now(), encoded))
            elif row[0] != encoded:
                raise self._error(f"run {run!r} has another mechanism in this file", "run", run)
            self.check_charged(run, completed, row[1] if row else 0)

    def check_charged(self, run: str, completed: int, charged: int) -> None:
        """Raise ``LedgerError`` if a run has completed more rounds than this file has charged for it."""
        if charged < completed:
            message = (
                f"run {run!r} has completed {completed} rounds, but only {charged} are charged: this file is an older "
            )
            raise self._error(message + "copy of its ledger, or another ledger", "completed", completed)

    def check_groups(self, groups: Iterable[PrivacyGroup]) -> None:
        """Raise ``LedgerError`` if groups, as clients chose them, would bypass a promised budget under a new name."""
        with self._transaction():
            self._check_promises(tuple(groups))

    def charge(self, run: str, costs: Mapping[str, PrivacyCost]) -> None:
        """Charge every group for rounds, durably; or charge none of them.

        A group with sampling rate 0 costs nothing and is never refused.

        Args:
            run: The name of the run.
            costs: What the rounds cost each group.

        Raises:
            BudgetError: If budgets would be exceeded; it names their groups.
            LedgerError: If the run or a group is unknown, a group of the run has no cost, or a group was charged by
                another kind of sampling.
        """
        rounds = max((cost.checked().rounds for cost in costs.values()), default=1)
        with self._transaction():
            row = self._db.execute("SELECT mechanism FROM runs WHERE name = ?", (run,)).fetchone()
            if row is None:
                raise self._error(f"there is no run {run!r}", "run", run)
            for group in msgspec.json.decode(row[0], type=Mechanism).groups:
                if group.name not in costs:
                    raise self._error(f"run {run!r} has a group {group.name!r} without a cost", "costs", group.name)
            self._db.execute("UPDATE runs SET charged = charged + ? WHERE name = ?", (rounds, run))
            for name, cost in costs.items():
                if not self.clients(name):
                    raise self._error(f"group {name!r} has not been in a run", "group", name)
                self._check_sampling(name, cost.sampling)
            refused = tuple(name for name, cost in costs.items() if not self._is_affordable(name, cost))
            if refused:
                budgets = " and ".join(f"the budget of {name!r}, {self.budget(name)}" for name in refused)
                raise BudgetError(f"{self.path}: another round would exceed {budgets}", refused)
            self._db.executemany(
                "INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT"
                ' (run, "group", noise_multiplier, sampling_rate, sampling) DO UPDATE'
                " SET rounds = rounds + excluded.rounds, latest = excluded.latest",
                [(run, name, *cost, _now()) for name, cost in costs.items()],
            )

    def promise(self, group: str, epsilon: float, delta: float) -> None:
        """Give a group a budget for all its runs, before its first run or later.

        Raises:
            InvalidValueError: If a value is out of range.
            LedgerError: If the group has a smaller budget already: a budget is lowered, never raised.
        """
        budget = Budget(epsilon, delta)
        with self._transaction():
            self._set_budget(group, budget)

    def check_budget(self, group: str, budget: Budget) -> None:
        """Raise what ``promise`` of this budget would raise, and change nothing."""
        require(group not in ("", SERVER), "group", group, f"a name, and not {SERVER!r}")
        previous = self.budget(group) if group in self.groups() else None
        if previous and not (budget.epsilon <= previous.epsilon and budget.delta <= previous.delta):
            raise self._error(
                f"group {group!r} was promised {previous}, which cannot become {budget}", "budget", budget
            )

    def lower_budget(self, group: str, budget: Budget) -> None:
        """Give a group this budget, or keep the epsilon or delta that it was promised where that is smaller."""
        with self._transaction():
            self._set_budget(group, budget.lowered(self.budget(group) if group in self.groups() else None))

    def register(self, client: str, group: str) -> str:
        """Register a client, by its identity, for a group that it chooses, durably.

        Returns:
            The group of the client's first registration, in which it stays.

        Raises:
            LedgerError: If the clients of this file are numbered.
        """
        require(client != "", "client", client, "an identity")
        require(group != "", "group", group, "a name")
        with self._transaction():
            self._check_client_kind(registering=True)
            row = self._db.execute('SELECT "group" FROM registrations WHERE client = ?', (client,)).fetchone()
            if row is None:
                self._db.execute("INSERT OR IGNORE INTO groups VALUES (?, 0, 0, NULL, NULL)", (group,))
                self._db.execute("INSERT INTO registrations VALUES (?, ?, ?)", (client, group, _now()))
            return str(row[0]) if row else group

    def registrations(self) -> dict[str, str]:
        """The group of every registered client, the oldest registration first."""
        with self._translate_errors():
            if self._version() < 2:  # such a file, opened to be read only, has no table of registrations
                return {}
            return dict(self._db.execute('SELECT client, "group" FROM registrations ORDER BY rowid'))

    def groups(self) -> tuple[str, ...]:
        """The groups of all runs, in the order of their clients, and then those that only have a budget."""
        with self._translate_errors():
            rows = self._db.execute("SELECT name FROM groups ORDER BY clients = 0, first, rowid")
            return tuple(name for (name,) in rows)

    def clients(self, group: str) -> range:
        """The client numbers of a group, none before its first run; ``LedgerError`` if it is unknown."""
        first, count = self._group_row(group, "first, clients")
        return range(first, first + count)

    def budget(self, group: str) -> Budget | None:
        """The budget of a group, if it was promised one; ``LedgerError`` if it is unknown."""
        epsilon, delta = self._group_row(group, "epsilon, delta")
        return None if epsilon is None else Budget(epsilon, delta)

    def costs(self, group: str, run: str | None = None) -> tuple[PrivacyCost, ...]:
        """What a group has been charged, over all runs or in one run."""
        with self._translate_errors():
            rows = self._db.execute(
                "SELECT noise_multiplier, sampling_rate, sampling, SUM(rounds) FROM charges"
                ' WHERE "group" = ?1 AND run = COALESCE(?2, run) GROUP BY 1, 2, 3 ORDER BY 1, 2, 3',
                (group, run),
            )
            return tuple(PrivacyCost(*row) for row in rows)

    def charged_rounds(self, prefix: str) -> int:
        """How many rounds are charged in all runs whose names start with a prefix."""
        with self._translate_errors():
            query = "SELECT COALESCE(SUM(charged), 0) FROM runs WHERE substr(name, 1, length(?1)) = ?1"
            return int(self._db.execute(query, (prefix,)).fetchone()[0])

    def runs(self) -> tuple[Run, ...]:
        """Every run, the oldest first."""
        with self._translate_errors():
            rows = self._db.execute(
                "SELECT name, started, mechanism, charged FROM runs ORDER BY started, rowid"
            ).fetchall()
        return tuple(
            Run(name, started, msgspec.json.decode(encoded, type=Mechanism), charged)
            for name, started, encoded, charged in rows
        )

    def _group_row(self, group: str, columns: str) -> tuple[Any, Any]:
        with self._translate_errors():
            row = self._db.execute(f"SELECT {columns} FROM groups WHERE name = ?", (group,)).fetchone()
        if row is None:
            raise self._error(f"there is no group {group!r}", "group", group)
        return row[0], row[1]

    def _set_budget(self, group: str, budget: Budget) -> None:
        self.check_budget(group, budget)
        self._db.execute("INSERT OR IGNORE INTO groups VALUES (?, 0, 0, NULL, NULL)", (group,))
        query = "UPDATE groups SET epsilon = ?, delta = ? WHERE name = ?"
        self._db.execute(query, (budget.epsilon, budget.delta, group))

    def _is_affordable(self, group: str, cost: PrivacyCost) -> bool:
        budget = self.budget(group)
        return budget is None or cost.free or within_budget((*self.costs(group), cost), budget)

    def _admit_range(self, name: str, clients: range) -> None:
        """Add a group, unless its clients or its name belong to another group."""
        rows = self._db.execute("SELECT name, first, clients FROM groups WHERE clients > 0").fetchall()
        for other_name, first, count in rows:
            other_clients = range(first, first + count)
            overlaps = other_clients.start < clients.stop and clients.start < other_clients.stop
            if (other_name, other_clients) != (name, clients) and (other_name == name or overlaps):
                message = f"clients {first} to {first + count - 1} are group {other_name!r} in this file, "
                message += f"so clients {clients.start} to {clients.stop - 1} cannot be group {name!r}"
                raise self._error(message, "groups", name)
        self._db.execute(
            "INSERT INTO groups VALUES (?, ?, ?, NULL, NULL) ON CONFLICT (name) DO UPDATE"
            " SET first = excluded.first, clients = excluded.clients",
            (name, clients.start, len(clients)),
        )

    def _admit_members(self, mechanism: Mechanism, members: Mapping[str, str]) -> None:
        """Let a run have these clients, if each is registered for the group that the run has it in."""
        registrations = self.registrations()
        group_names = {group.name for group in mechanism.groups}
        for client, name in members.items():
            registered = registrations.get(client)
            if registered != name:
                message = f"client {client!r} is registered for {registered!r}, not for {name!r}"
                raise self._error(message, "members", client)
            if name not in group_names:  # the client would not be charged
                message = f"client {client!r} is registered for {name!r}, which the mechanism does not have"
                raise self._error(message, "members", client)
        noisy = {group.name for run in self.runs() for group in run.mechanism.groups if not group.opted_out}
        for group in mechanism.groups:
            rule = f"above 0, as in other runs of {self.path}: clients registered for {group.name!r} with noise"
            require(not group.opted_out or group.name not in noisy, "noise_multiplier", group.noise_multiplier, rule)
            count = sum(name == group.name for name in members.values())
            require(count == group.clients, f"clients of {group.name!r}", group.clients, f"its {count} members")
        first = 0
        for (name,) in self._db.execute("SELECT name FROM groups ORDER BY rowid").fetchall():
            count = sum(registered == name for registered in registrations.values())
            self._db.execute("UPDATE groups SET first = ?, clients = ? WHERE name = ?", (first, count, name))
            first += count

    def _check_client_kind(self, registering: bool) -> None:
        """A file's clients are either numbered or registered: neither can vouch for the other."""
        registered = set(self.registrations().values())
        if registering and any(self.clients(name) and name not in registered for name in self.groups()):
            raise self._error("its clients are numbered, so none can register; use another file", "members")
        if registered and not registering:
            raise self._error("its clients are registered, so a run must name its members", "members")

    def _check_population(self, population: str | None) -> None:
        """Client numbers are of one population: in another, the same number is another client."""
        row = self._db.execute("SELECT * FROM population").fetchone()
        if population is not None and row is None:
            self._db.execute("INSERT INTO population VALUES (?)", (population,))
        elif population is not None and row[0] != population:
            message = f"its clients are those of {row[0]}, not of {population}; use another file"
            raise self._error(message, "population", population)

    def _check_sampling(self, group: str, sampling: str) -> None:
        """Costs by one kind of sampling do not compose with costs by the other."""
        mixed = {cost.sampling for cost in self.costs(group)} - {sampling}
        if mixed:
            message = (
                f"{group!r} was charged with {min(mixed)} sampling, which does not compose with {sampling} sampling"
            )
            raise self._error(f"{message}; use another file", "sampling", sampling)

    def _check_promises(self, groups: tuple[PrivacyGroup, ...]) -> None:
        """A budget that waits for its group is not bypassed under a new name, such as a misspelt one."""
        waiting = [name for name in self.groups() if not self.clients(name) and self.budget(name) is not None]
        absent = sorted(set(waiting) - {group.name for group in groups})
        new = [group.name for group in groups if not group.opted_out and group.name not in self.groups()]
        if absent and new:
            message = (
                f"group {absent[0]!r} was promised a budget and has not been in a run, while {new[0]!r} is new and "
            )
            message += f"was promised none; if they are not the same clients, promise {new[0]!r} a budget too"
            raise self._error(message, "groups", new[0])


def _client_ranges(mechanism: Mechanism) -> Iterator[tuple[str, range]]:
    """Each group with the numbers of its clients."""
    first = 0
    for group in mechanism.groups:
        yield group.name, range(first, first + group.clients)
        first += group.clients


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
