"""What a client keeps for itself: who it is, its personal model, what it was promised, and what it has spent.

    DIR/identity             a random name, made at the first start, by which a server knows the client again
    DIR/personal-KIND.npz    the personal model, one for each kind of model (its arrays' names and shapes); it never leaves
    DIR/promises.json        for each run, what the client's level was promised when it was first asked
    DIR/client.ledger        every round of the runs that the client is in; `fedhdp ledger show` reads it

Every file is written whole and moved into place. A client without a folder keeps the first and last nowhere and the
others in Flower's memory of the run, which a restart of the SuperNode forgets.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from flwr.app import ConfigRecord, RecordDict

from fedhdp.flower.protocol import Arrays, Declined, Offer, Order, as_record, from_record, shapes
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import PrivacyCost, rounds_left, within_budget
from fedhdp.privacy.ledger import Budget, BudgetError, Ledger
from fedhdp.results.store import atomic_write, read_arrays, read_value, write_arrays, write_value

ME = "this client"
SPENT = "this client's budget is spent"


class Promise(msgspec.Struct):
    """The least privacy that a client accepts in a run, what was on offer, and which rounds of it are counted."""

    noise_multiplier: float
    sampling_rate: float
    rounds: int = 0  # of the run that the client has paid for, and those before it came
    levels: list[str] = []  # the strictest first
    level: str = ""  # of them, the client's
    seen: int = 0  # rounds of the run when it last trained, by the server's count or by its own if that is more

    def once(self, rounds: int = 1) -> PrivacyCost:
        """What rounds cost the client, at most."""
        return PrivacyCost(self.noise_multiplier, self.sampling_rate, "poisson", rounds)


class Memory:
    """What a client without a folder keeps: in Flower's memory of the run."""

    def __init__(self, state: RecordDict):
        self.state = state

    def identity(self) -> str | None:
        """None: the server knows the client by its node."""
        return None

    def personal(self, like: Arrays) -> Arrays | None:
        """The personal model of this kind, if there is one yet."""
        return from_record(self.state.array_records[_kind(like)]) if _kind(like) in self.state else None

    def keep_personal(self, personal: Arrays) -> None:
        """Keep the personal model."""
        self.state[_kind(personal)] = as_record(personal)

    def promises(self) -> dict[str, Promise]:
        """What was promised, by run."""
        kept = self.state.config_records.get("promises") or ConfigRecord()
        return {run: msgspec.json.decode(str(text), type=Promise) for run, text in kept.items()}

    def keep_promises(self, promises: Mapping[str, Promise]) -> None:
        """Keep what was promised."""
        self.state["promises"] = ConfigRecord(
            {run: msgspec.json.encode(said).decode() for run, said in promises.items()}
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else reads or writes here meanwhile; Flower's memory is this run's alone."""
        yield

    def left(self, once: PrivacyCost, budget: Budget | None) -> float:
        """How many such rounds the budget still allows."""
        return math.inf if budget is None else 0

    def overspent(self, budget: Budget | None) -> bool:
        """Whether more is counted than the budget allows, which may have been lowered since; here nothing is counted."""
        return False

    def charge(self, run: str, spent: PrivacyCost, budget: Budget | None) -> None:
        """Nothing is counted; so no budget can be kept."""
        if budget is not None:
            raise Declined("a budget needs a directory to count in")


class Folder(Memory):
    """What a client with a folder keeps there."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def identity(self) -> str | None:
        """The client's random name."""
        path = self.path / "identity"
        if not path.exists():
            atomic_write(path, secrets.token_hex(16).encode())
        return path.read_text(encoding="utf-8")

    def personal(self, like: Arrays) -> Arrays | None:
        """The personal model of this kind, if there is one yet."""
        path = self.path / f"{_kind(like)}.npz"
        return read_arrays(path) if path.exists() else None

    def keep_personal(self, personal: Arrays) -> None:
        """Keep the personal model, whole or not at all."""
        with self.alone():
            write_arrays(self.path / f"{_kind(personal)}.npz", personal)

    def promises(self) -> dict[str, Promise]:
        """What was promised, by run."""
        path = self.path / "promises.json"
        return read_value(path, dict[str, Promise]) if path.exists() else {}

    def keep_promises(self, promises: Mapping[str, Promise]) -> None:
        """Keep what was promised."""
        write_value(self.path / "promises.json", promises)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else reads or writes here meanwhile: a SuperNode may serve several runs at once."""
        with open(self.path / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def left(self, once: PrivacyCost, budget: Budget | None) -> float:
        """How many such rounds every budget that was ever wanted still allows."""
        with Ledger(self.path / "client.ledger") as ledger:
            known = ledger.budget(ME) if ME in ledger.groups() else None
            budgets = [one for one in (budget, known) if one is not None]
            return min((rounds_left(ledger.costs(ME), once, one) for one in budgets), default=math.inf)

    def overspent(self, budget: Budget | None) -> bool:
        """Whether more is counted than any budget allows that was ever wanted."""
        with Ledger(self.path / "client.ledger") as ledger:
            if budget is not None:
                ledger.lower_budget(ME, budget)
            known = ledger.budget(ME) if ME in ledger.groups() else None
            return known is not None and not within_budget(ledger.costs(ME), known)

    def charge(self, run: str, spent: PrivacyCost, budget: Budget | None) -> None:
        """Count rounds in the client's own ledger before anything is sent, or decline where its budget is spent."""
        name = f"{run} z={spent.noise_multiplier!r} q={spent.sampling_rate!r}"
        alone = Mechanism((PrivacyGroup(ME, 1, spent.noise_multiplier, spent.sampling_rate),), clip=1.0)
        with Ledger(self.path / "client.ledger") as ledger:
            ledger.begin(name, alone)
            if budget is not None:
                ledger.lower_budget(ME, budget)  # all that were ever wanted hold
            try:
                ledger.charge(name, {ME: spent})
            except BudgetError as error:
                raise Declined(SPENT) from error


def _kind(model: Arrays) -> str:
    """The name under which a personal model is kept, so that one directory, and one budget, serves several models."""
    said = msgspec.json.encode(sorted(shapes(model).items()))
    return f"personal-{hashlib.sha256(said).hexdigest()[:8]}"


def promised(offer: Offer, level: str | None) -> Promise:
    """What the client's level is promised; who does not say is promised what the strictest level is."""
    place, charged = _place(offer.level, level), offer.charged
    what = (offer.noise_multiplier[place], offer.sampling_rate[place])
    return Promise(*what, charged, offer.level, offer.level[place], charged)


def check(order: Order, promises: Mapping[str, Promise], level: str | None) -> Promise:
    """Decline a round that gives less privacy than was promised, or than the owner wants by now; else say what holds."""
    promise = promises.get(order.run)
    if promise is None:
        raise Declined("was not asked in this run, so nothing is promised")
    noise_before = any(one.noise_multiplier > 0 for one in promises.values() if one.level == promise.level)
    if promise.level and promise.noise_multiplier == 0 and noise_before:
        raise Declined(f"{promise.level} has no noise now, and had some in another run")
    noisy = order.noise_multiplier >= promise.noise_multiplier * (1 - 1e-9)  # not where one is no number
    if not (noisy and order.sampling_rate <= promise.sampling_rate):
        raise Declined("less privacy than was promised")
    if order.sampling_rate <= 0:
        raise Declined("is never drawn at a rate of 0")  # and would count nothing for it
    if promise.levels and order.level not in promise.levels[: _place(promise.levels, level) + 1]:
        raise Declined(f"wants {level or 'the strictest level'} by now, not {order.level}")
    return promise


def _place(levels: list[str], level: str | None) -> int:
    """Where a level stands, the strictest first; who does not say, or asks for what is not on offer, gets that."""
    return levels.index(level) if level in levels else 0
