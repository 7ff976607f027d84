"""What a client keeps for itself: who it is, its personal model, what it was promised, and what it has spent.

    DIR/identity             a random name, made at the first start, by which a server knows the client again
    DIR/personal.npz         the personal model; it never leaves
    DIR/promises.json        for each run, what the client's level was promised when it was first asked
    DIR/client.ledger        every round that the client took part in; `fedhdp ledger show` reads it

Every file is written whole and moved into place. A client without a folder keeps the first and last nowhere and the
others in Flower's memory of the run, which a restart of the SuperNode forgets.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec
from flwr.app import ConfigRecord, RecordDict

from fedhdp.accounting import Spend, fits
from fedhdp.flower.messages import Arrays, Declined, Offer, Order, as_record, from_record
from fedhdp.ledger import Budget, BudgetError, Ledger
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.results import read_arrays, read_value, write_arrays, write_value, write_whole

ME = "this client"
SPENT = "this client's budget is spent"


class Promise(msgspec.Struct):
    """The least privacy that a client accepts in a run, what was on offer, and how many rounds it knows to be paid for."""

    noise_multiplier: float
    sampling_rate: float
    rounds: int = 0
    levels: list[str] = []  # the strictest first

    def once(self, rounds: int = 1) -> Spend:
        """What rounds cost the client, at most."""
        return Spend(self.noise_multiplier, self.sampling_rate, "poisson", rounds)


class Memory:
    """What a client without a folder keeps: in Flower's memory of the run."""

    def __init__(self, state: RecordDict):
        self.state = state

    def identity(self) -> str | None:
        """None: the server knows the client by its node."""
        return None

    def personal(self) -> Arrays | None:
        """The personal model, if there is one yet."""
        return from_record(self.state.array_records["personal"]) if "personal" in self.state else None

    def keep_personal(self, personal: Arrays) -> None:
        """Keep the personal model."""
        self.state["personal"] = as_record(personal)

    def promises(self) -> dict[str, Promise]:
        """What was promised, by run."""
        kept = self.state.config_records.get("promises") or ConfigRecord()
        return {run: msgspec.json.decode(str(text), type=Promise) for run, text in kept.items()}

    def keep_promises(self, promises: Mapping[str, Promise]) -> None:
        """Keep what was promised."""
        self.state["promises"] = ConfigRecord(
            {run: msgspec.json.encode(said).decode() for run, said in promises.items()}
        )

    def charge(self, run: str, spent: Spend, budget: Budget | None) -> None:
        """Nothing is counted; so no budget can be kept."""
        if budget is not None:
            raise Declined("a budget needs a directory to count in")

    def afford(self, spent: Spend, budget: Budget | None) -> None:
        """Decline where a budget has no room for this."""
        self.charge("", spent, budget)


class Folder(Memory):
    """What a client with a folder keeps there."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def identity(self) -> str | None:
        """The client's random name."""
        path = self.path / "identity"
        if not path.exists():
            write_whole(path, secrets.token_hex(16).encode())
        return path.read_text()

    def personal(self) -> Arrays | None:
        """The personal model, if there is one yet."""
        path = self.path / "personal.npz"
        return read_arrays(path) if path.exists() else None

    def keep_personal(self, personal: Arrays) -> None:
        """Keep the personal model, whole or not at all."""
        write_arrays(self.path / "personal.npz", personal)

    def promises(self) -> dict[str, Promise]:
        """What was promised, by run."""
        path = self.path / "promises.json"
        return read_value(path, dict[str, Promise]) if path.exists() else {}

    def keep_promises(self, promises: Mapping[str, Promise]) -> None:
        """Keep what was promised."""
        write_value(self.path / "promises.json", promises)

    def charge(self, run: str, spent: Spend, budget: Budget | None) -> None:
        """Count rounds in the client's own ledger before anything is sent, or decline where its budget is spent."""
        name = f"{run} z={spent.noise_multiplier!r} q={spent.sampling_rate!r}"
        alone = Mechanism((PrivacyGroup(ME, 1, spent.noise_multiplier, spent.sampling_rate),), clip=1.0)
        with Ledger(self.path / "client.ledger", fits) as ledger:
            ledger.begin(name, alone)
            if budget is not None:
                ledger.tighten(ME, *budget)  # all that were ever wanted hold
            try:
                ledger.charge(name, {ME: spent})
            except BudgetError as error:
                raise Declined(SPENT) from error

    def afford(self, spent: Spend, budget: Budget | None) -> None:
        """Decline where a budget has no room for this."""
        with Ledger(self.path / "client.ledger", fits) as ledger:
            known = [ledger.budget(ME)] if ME in ledger.groups() else []
            for one in [budget, *known]:
                if one is not None and not fits((*ledger.spent(ME), spent), *one):
                    raise Declined(SPENT)


def promised(offer: Offer, level: str | None) -> Promise:
    """What the client's level is promised; who does not say is promised what the strictest level is."""
    place = _place(offer.level, level)
    return Promise(offer.noise_multiplier[place], offer.sampling_rate[place], offer.charged, offer.level)


def check(order: Order, promise: Promise | None, level: str | None) -> Promise:
    """Decline a round that gives less privacy than was promised, or than the owner wants by now; else say what holds."""
    if promise is None:
        if level is not None and order.level != level:
            raise Declined(f"chose {level}, not {order.level}")
        return Promise(order.noise_multiplier, order.sampling_rate)
    if order.noise_multiplier < promise.noise_multiplier * (1 - 1e-9) or order.sampling_rate > promise.sampling_rate:
        raise Declined("less privacy than was promised")
    if promise.levels and order.level not in promise.levels[: _place(promise.levels, level) + 1]:
        raise Declined(f"wants {level or 'the strictest level'} by now, not {order.level}")
    return promise


def _place(levels: list[str], level: str | None) -> int:
    """Where a level stands, the strictest first; who does not say, or asks for what is not on offer, gets that."""
    return levels.index(level) if level in levels else 0
