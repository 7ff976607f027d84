"""The ledger: what every group has been charged, in one SQLite file for all runs of a population.

A round is charged before its result is seen, and a charge is durable when ``charge`` returns. A crash may leave a round
charged that was never shown, never the other way round. Charges only grow: a round that is run again from an older
checkpoint is charged again. A group's budget is checked, by Renyi accounting, in the transaction that charges the group,
so concurrent runs cannot exceed it together. The file stores facts, not epsilons: noise multiplier, sampling rate,
sampling and number of rounds, from which the events of accounting are rebuilt.

One table has the clients by id, each with its group. A client stays in the group in which it was first, in all runs of
the file, so its cost is at most its group's: a client that joins a group inherits the group's cost. A budget can be
promised to a group before its first run; it has no clients until then. ``begin`` refuses to resume a run that has
completed more rounds than the file has charged, as happens when an old copy of the file was restored.

Data without ids have numbers for them. These identify clients of one population only, which the first run describes;
another population needs another file. In deployments clients register under an identity of their own before a run.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fedhdp.errors import LedgerError, require
from fedhdp.mechanism import Mechanism, PrivacyGroup, check_group_name
from fedhdp.privacy._ledger_db import LedgerFile
from fedhdp.privacy.accounting import within_budget
from fedhdp.privacy.costs import PrivacyCost


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


class Charge(NamedTuple):
    """What a run has charged a group at one cost, and when the latest of it was."""

    run: str
    latest: datetime.datetime
    cost: PrivacyCost


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
        admit_new: bool = False,
    ) -> None:
        """Open a run, or resume it.

        Args:
            run: The name of the run.
            mechanism: Its mechanism; when the run is resumed, the same.
            completed: The rounds that the run has completed.
            members: The run's clients, by id, with their groups. None: numbers, one group after the other.
            population: Where ids are numbers, a description of the clients who have them.
            admit_new: Whether clients whom the file does not know are admitted, as in a simulation. Those of a deployment
                register.

        Raises:
            LedgerError: If the run has another mechanism or fewer charged than completed rounds in this file, if its
                clients belong to other groups or to another population, or if a promised budget would be bypassed.
        """
        require(run != "", "run", run, "a name")
        encoded = msgspec.json.encode(mechanism).decode()
        with self._transaction():
            self._check_promises(mechanism.groups)
            has_numbers = members is None or population is not None
            self._check_population(has_numbers, population)
            members = _numbered(mechanism) if members is None else members
            self._admit_members(mechanism, members, has_numbers or admit_new, keeps_noise=not has_numbers)
            row = self._db.execute("SELECT mechanism, charged FROM runs WHERE name = ?", (run,)).fetchone()
            if row is None:
                started = _now()
                self._db.execute("INSERT INTO runs VALUES (?, ?, ?, 0)", (run, started, encoded))
                self._record("run", run, started, encoded)
            elif msgspec.json.decode(row[0], type=Mechanism) != mechanism:  # fields may be new since it was written
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
                if not self._has_clients(name):
                    raise self._error(f"group {name!r} has not been in a run", "group", name)
                self._check_sampling(name, cost.sampling)
            refused = tuple(name for name, cost in costs.items() if not self._is_affordable(name, cost))
            if refused:
                budgets = " and ".join(f"the budget of {name!r}, {self.budget(name)}" for name in refused)
                raise BudgetError(f"{self.path}: another round would exceed {budgets}", refused)
            latest = _now()
            self._record("charge", run, rounds, latest, [(name, *cost) for name, cost in costs.items()])
            self._db.executemany(
                "INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT"
                ' (run, "group", noise_multiplier, sampling_rate, sampling) DO UPDATE'
                " SET rounds = rounds + excluded.rounds, latest = excluded.latest",
                [(run, name, *cost, latest) for name, cost in costs.items()],
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
        check_group_name("group", group)
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
            LedgerError: If the ids of this file's clients are numbers.
        """
        require(client != "", "client", client, "an identity")
        require(group != "", "group", group, "a name")
        with self._transaction():
            self._check_population(has_numbers=False, population=None)
            known = self.group_of(client)
            if known is None:
                self._add_clients([(client, group)])
            return known or group

    def group_of(self, client: str) -> str | None:
        """The group of a client, or None if the file does not know it."""
        with self._translate_errors():
            query = 'SELECT name FROM clients JOIN groups ON number = "group" WHERE id = ?'
            row = self._db.execute(query, (client,)).fetchone()
        return str(row[0]) if row else None

    def registrations(self) -> dict[str, str]:
        """The group of every client, by id, in the order in which they came."""
        with self._translate_errors():
            query = 'SELECT id, name FROM clients JOIN groups ON number = "group" ORDER BY clients.rowid'
            return dict(self._db.execute(query))

    def groups(self) -> tuple[str, ...]:
        """The groups in the order of their first clients, and then those that only have a budget."""
        first = '(SELECT MIN(rowid) FROM clients WHERE "group" = number)'
        with self._translate_errors():
            rows = self._db.execute(f"SELECT name FROM groups ORDER BY {first} IS NULL, {first}, number")
            return tuple(name for (name,) in rows)

    def clients(self, group: str) -> int:
        """The number of clients of a group, 0 before its first; ``LedgerError`` if it is unknown."""
        number, _ = self._group_row(group, "number, name")
        with self._translate_errors():
            return int(self._db.execute('SELECT COUNT(*) FROM clients WHERE "group" = ?', (number,)).fetchone()[0])

    def _has_clients(self, group: str) -> bool:
        number, _ = self._group_row(group, "number, name")
        query = 'SELECT EXISTS (SELECT 1 FROM clients WHERE "group" = ?)'
        return bool(self._db.execute(query, (number,)).fetchone()[0])

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

    def charges(self, group: str) -> tuple[Charge, ...]:
        """What each run has charged a group, in the order of the latest charges."""
        with self._translate_errors():
            rows = self._db.execute(
                "SELECT run, latest, noise_multiplier, sampling_rate, sampling, rounds FROM charges"
                ' WHERE "group" = ? ORDER BY latest, rowid',
                (group,),
            ).fetchall()
        return tuple(
            Charge(run, datetime.datetime.fromisoformat(latest), PrivacyCost(*cost)) for run, latest, *cost in rows
        )

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
        self._db.execute("INSERT OR IGNORE INTO groups (name) VALUES (?)", (group,))
        query = "UPDATE groups SET epsilon = ?, delta = ? WHERE name = ?"
        self._db.execute(query, (budget.epsilon, budget.delta, group))
        self._record("budget", group, budget.epsilon, budget.delta)

    def _is_affordable(self, group: str, cost: PrivacyCost) -> bool:
        budget = self.budget(group)
        return budget is None or cost.free or within_budget((*self.costs(group), cost), budget)

    def _add_clients(self, clients: Sequence[tuple[str, str]]) -> None:
        """Add clients, by id, with their groups."""
        if not clients:
            return
        self._record("clients", dict(clients))
        names = dict.fromkeys(group for _, group in clients)
        self._db.executemany("INSERT OR IGNORE INTO groups (name) VALUES (?)", [(name,) for name in names])
        numbers = dict(self._db.execute("SELECT name, number FROM groups"))
        self._db.executemany("INSERT INTO clients VALUES (?, ?)", [(client, numbers[name]) for client, name in clients])

    def _admit_members(
        self, mechanism: Mechanism, members: Mapping[str, str], admit_new: bool, keeps_noise: bool
    ) -> None:
        """Let a run have these clients, if each is in the group that the file has it in, or is new and may be.

        With ``keeps_noise`` no group that had noise in another run may have none.
        """
        known, sizes = self.registrations(), {group.name: 0 for group in mechanism.groups}
        new: dict[str, list[str]] = {name: [] for name in sizes}
        for client, name in members.items():
            own = known.get(client)
            if own != name and (own is not None or not admit_new):
                is_in = "has not registered" if own is None else f"is in group {own!r}"
                raise self._error(f"client {client!r} {is_in}, so it cannot be in {name!r}", "members", client)
            if name not in sizes:  # the client would not be charged
                message = f"client {client!r} is in group {name!r}, which the mechanism does not have"
                raise self._error(message, "members", client)
            sizes[name] += 1
            if own is None:
                new[name].append(client)
        noisy = {group.name for run in self.runs() for group in run.mechanism.groups if not group.opted_out}
        for group in mechanism.groups:
            rule = f"above 0, as in other runs of {self.path}: the clients of {group.name!r} chose noise"
            has_noise = not group.opted_out or group.name not in noisy
            require(has_noise or not keeps_noise, "noise_multiplier", group.noise_multiplier, rule)
            size = sizes[group.name]
            require(size == group.clients, f"clients of {group.name!r}", group.clients, f"its {size} members")
        self._add_clients([(client, name) for name, clients in new.items() for client in clients])

    def _check_population(self, has_numbers: bool, population: str | None) -> None:
        """Numbers are ids in one population alone: in another, the same number is another client."""
        row = self._db.execute("SELECT description FROM population").fetchone()
        if not has_numbers and row is not None:
            message = "its clients' ids are numbers of a population, so others cannot be in it; use another file"
            raise self._error(message, "members")
        if has_numbers and row is None and self._db.execute("SELECT EXISTS (SELECT 1 FROM clients)").fetchone()[0]:
            raise self._error(
                "its clients have ids of their own, and this run has numbers; use another file", "members"
            )
        if has_numbers and row is None:
            self._db.execute("INSERT INTO population VALUES (?)", (population or "",))
            self._record("population", population or "")
        elif population is not None and row[0] != population:
            message = f"its clients are those of {row[0] or 'a population without a description'}, not of {population}"
            raise self._error(f"{message}; use another file", "population", population)

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
        waiting = [name for name in self.groups() if not self._has_clients(name) and self.budget(name) is not None]
        absent = sorted(set(waiting) - {group.name for group in groups})
        new = [group.name for group in groups if not group.opted_out and group.name not in self.groups()]
        if absent and new:
            message = (
                f"group {absent[0]!r} was promised a budget and has not been in a run, while {new[0]!r} is new and "
            )
            message += f"was promised none; if they are not the same clients, promise {new[0]!r} a budget too"
            raise self._error(message, "groups", new[0])


def _numbered(mechanism: Mechanism) -> dict[str, str]:
    """Clients whose ids are numbers, one group after the other."""
    names = (group.name for group in mechanism.groups for _ in range(group.clients))
    return {str(number): name for number, name in enumerate(names)}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
