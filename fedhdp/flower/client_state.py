"""What a client keeps: its id, its personal models, what it was promised, and its privacy costs.

    DIR/identity             a random id, made at the first start, by which a server recognizes the client
    DIR/personal-KIND.npz    the personal model, one for each set of array names and shapes, and for each public basis; it
                             never leaves the client
    DIR/promises.json        for each run, what the client's level was promised in its first query
    DIR/client.ledger        the rounds of all runs that the client is in; `fedhdp ledger show` prints it

Files are replaced atomically. A client without a directory has no id and no ledger; its models and promises are in Flower's
state of the run, which is lost when the SuperNode restarts.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from flwr.app import ConfigRecord, RecordDict

from fedhdp.basis import fingerprint
from fedhdp.flower.protocol import (
    BASIS,
    Arrays,
    DeclinedRound,
    LevelOffer,
    RoundRequest,
    array_shapes,
    from_record,
    to_record,
)
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import rounds_left, within_budget
from fedhdp.privacy.costs import PrivacyCost
from fedhdp.privacy.ledger import Budget, BudgetError, Ledger
from fedhdp.results.store import atomic_write, lock_file, read_arrays, read_value, write_arrays, write_value

SELF_GROUP = "this client"  # the client's only group in its own ledger
BUDGET_EXHAUSTED = "this client's budget is exhausted"


class Promise(msgspec.Struct):
    """The least privacy that a client accepts in a run, and the rounds of the run in its ledger."""

    noise_multiplier: float
    sampling_rate: float
    charged_rounds: int = 0  # in the client's ledger, and those before it joined
    levels: list[str] = []  # on offer, the strictest first
    level: str = ""  # the client's
    last_round: int = 0  # in which it trained, by the server's count or by the client's if that is more

    def cost(self, rounds: int = 1) -> PrivacyCost:
        """The most that rounds cost the client."""
        return PrivacyCost(self.noise_multiplier, self.sampling_rate, "poisson", rounds)


class InMemoryState:
    """The state of a client without a directory, in Flower's state of the run."""

    def __init__(self, state: RecordDict):
        self.state = state

    def client_id(self) -> str | None:
        """None: the server identifies the client by its node."""
        return None

    def load_personal(self, like: Arrays) -> Arrays | None:
        """The personal model with the names and shapes of ``like``, if there is one."""
        return from_record(self.state.array_records[_kind(like)]) if _kind(like) in self.state else None

    def save_personal(self, personal: Arrays) -> None:
        """Keep the personal model."""
        self.state[_kind(personal)] = to_record(personal)

    def load_promises(self) -> dict[str, Promise]:
        """The promises by run."""
        record = self.state.config_records.get("promises") or ConfigRecord()
        return {run: msgspec.json.decode(str(text), type=Promise) for run, text in record.items()}

    def save_promises(self, promises: Mapping[str, Promise]) -> None:
        """Keep the promises."""
        record = ConfigRecord()
        for run, promise in promises.items():
            record[run] = msgspec.json.encode(promise).decode()
        self.state["promises"] = record

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other processes; none share Flower's state of a run."""
        yield

    def rounds_left(self, cost: PrivacyCost, budget: Budget | None) -> float:
        """How many rounds of this cost the client's budget allows: none, since it cannot be enforced."""
        return math.inf if budget is None else 0

    def is_overspent(self, budget: Budget | None) -> bool:
        """Whether the ledger exceeds the client's budget, which its owner may have lowered."""
        return False

    def charge(self, run: str, cost: PrivacyCost, budget: Budget | None) -> None:
        """Decline if there is a budget, which cannot be enforced; costs are not recorded.

        Raises:
            DeclinedRound: If there is a budget.
        """
        if budget is not None:
            raise DeclinedRound("a budget needs a directory for the client's ledger")


class ClientStateDir(InMemoryState):
    """The state of a client in its directory, which is readable by its owner alone."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def client_id(self) -> str | None:
        """The client's random id; call it while the directory is locked."""
        path = self.path / "identity"
        if not path.exists():
            atomic_write(path, secrets.token_hex(16).encode())
        return path.read_text(encoding="utf-8")

    def load_personal(self, like: Arrays) -> Arrays | None:
        path = self.path / f"{_kind(like)}.npz"
        return read_arrays(path) if path.exists() else None

    def save_personal(self, personal: Arrays) -> None:
        with self.locked():
            write_arrays(self.path / f"{_kind(personal)}.npz", personal)

    def load_promises(self) -> dict[str, Promise]:
        path = self.path / "promises.json"
        return read_value(path, dict[str, Promise]) if path.exists() else {}

    def save_promises(self, promises: Mapping[str, Promise]) -> None:
        write_value(self.path / "promises.json", promises)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other processes: a SuperNode may serve several runs at once."""
        with open(self.path / ".lock", "w") as file:
            lock_file(file, wait=True)
            yield

    def rounds_left(self, cost: PrivacyCost, budget: Budget | None) -> float:
        """How many rounds of this cost the client's budget allows, and every budget that it had before."""
        with self._ledger() as ledger:
            budgets = [limit for limit in (budget, _recorded_budget(ledger)) if limit is not None]
            costs = ledger.costs(SELF_GROUP)
            return min((rounds_left(costs, cost, limit) for limit in budgets), default=math.inf)

    def is_overspent(self, budget: Budget | None) -> bool:
        """Whether the ledger exceeds the client's budget, or one that it had before."""
        with self._ledger() as ledger:
            if budget is not None:
                ledger.lower_budget(SELF_GROUP, budget)
            recorded = _recorded_budget(ledger)
            return recorded is not None and not within_budget(ledger.costs(SELF_GROUP), recorded)

    def charge(self, run: str, cost: PrivacyCost, budget: Budget | None) -> None:
        """Charge rounds in the client's ledger; to be called before the client sends anything.

        Raises:
            DeclinedRound: If a budget does not allow the rounds.
        """
        name = f"{run} z={cost.noise_multiplier!r} q={cost.sampling_rate!r}"
        group = PrivacyGroup(SELF_GROUP, 1, cost.noise_multiplier, cost.sampling_rate)
        with self._ledger() as ledger:
            ledger.begin(name, Mechanism((group,), clip=1.0))
            if budget is not None:
                ledger.lower_budget(SELF_GROUP, budget)
            try:
                ledger.charge(name, {SELF_GROUP: cost})
            except BudgetError as error:
                raise DeclinedRound(BUDGET_EXHAUSTED) from error

    def _ledger(self) -> Ledger:
        return Ledger(self.path / "client.ledger")


def make_promise(offer: LevelOffer, level: str | None) -> Promise:
    """What the owner's level is promised; without a level, or with one that is not on offer, it is the strictest."""
    index, charged = _level_index(offer.levels, level), offer.charged_rounds
    noise_multiplier, sampling_rate = offer.noise_multipliers[index], offer.sampling_rates[index]
    return Promise(noise_multiplier, sampling_rate, charged, offer.levels, offer.levels[index], charged)


def check_request(request: RoundRequest, promises: Mapping[str, Promise], level: str | None) -> Promise:
    """Compare a request with the promise of its run.

    Args:
        request: The server's request.
        promises: All promises by run.
        level: The level in the owner's configuration; it may be stricter than the promise's.

    Returns:
        The promise of the request's run.

    Raises:
        DeclinedRound: If the round gives less privacy than was promised, or than the owner's level.
    """
    promise = promises.get(request.run)
    if promise is None:
        raise DeclinedRound("got no query in this run, so nothing is promised")
    had_noise = any(past.noise_multiplier > 0 for past in promises.values() if past.level == promise.level)
    if promise.level and promise.noise_multiplier == 0 and had_noise:
        raise DeclinedRound(f"level {promise.level} has no noise in this run, but had some in another")
    has_noise = request.noise_multiplier >= promise.noise_multiplier * (1 - 1e-9)  # False for NaN
    if not (has_noise and request.sampling_rate <= promise.sampling_rate):
        raise DeclinedRound("less privacy than was promised")
    if request.sampling_rate <= 0:
        raise DeclinedRound("the sampling rate is 0")  # the round would be charged as free
    accepted_levels = promise.levels[: _level_index(promise.levels, level) + 1]
    if promise.levels and request.level not in accepted_levels:
        raise DeclinedRound(f"wants {level or 'the strictest level'}, not {request.level}")
    return promise


def _level_index(levels: list[str], level: str | None) -> int:
    """A level's index among levels from the strictest on; the strictest for None and for levels not on offer."""
    return levels.index(level) if level in levels else 0


def _kind(model: Arrays) -> str:
    """The name of a personal model's file: one directory, and one budget, serves models of different shapes and bases."""
    content = msgspec.json.encode(sorted(array_shapes(model).items()))
    if BASIS in model:  # on another basis the same parameters are another model
        content += fingerprint(model[BASIS]).encode()
    return f"personal-{hashlib.sha256(content).hexdigest()[:8]}"


def _recorded_budget(ledger: Ledger) -> Budget | None:
    return ledger.budget(SELF_GROUP) if SELF_GROUP in ledger.groups() else None
