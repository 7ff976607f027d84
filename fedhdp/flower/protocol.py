"""What is said between server and client, and how the server reads it: nothing in a reply is taken on trust.

    query      → the levels on ``Offer``              ← which level, who it is, and whether its own budget is spent
    train      → the global model and its ``Order``   ← the update; how good both models are, if asked
    evaluate   → the global model and its ``Order``   ← how good both models are

A model is a dictionary of named arrays of single-precision floats; the server knows the names and shapes, and every
reply must have exactly these. An ``Order`` carries a token that is drawn for one client and one round, and a reply
must bring it back, so that an old reply is not taken for a new one.

Axis letters: P parameters.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from fedhdp.errors import require
from fedhdp.mechanism import MAX_VALUE

Arrays = dict[str, np.ndarray]
MODELS = ("global", "personal")
HEADER = 1024  # bytes that an array may take beside its numbers


class Order(msgspec.Struct, frozen=True):
    """What a client is asked to do, and what it is promised for it."""

    token: str
    run: str
    round: int  # rounds completed before this one
    charged: int  # rounds of the run that are paid for, this one and those that a crash cut short included
    level: str
    noise_multiplier: float  # what the client's group was promised; others' choices may give it more, which is not told
    sampling_rate: float
    pull: float
    evaluate: bool = False


class Offer(msgspec.Struct, frozen=True):
    """The levels that a run offers, the strictest first, and what each is promised."""

    run: str
    charged: int  # rounds of the run that are paid for, none of them by who is new
    level: list[str]
    noise_multiplier: list[float]
    sampling_rate: list[float]
    rounds: int = 0  # that the run is to have

    def __post_init__(self) -> None:
        levels = list(zip(self.level, self.noise_multiplier, self.sampling_rate))
        whole = len(self.level) == len(self.noise_multiplier) == len(self.sampling_rate) == len(set(self.level)) > 0
        require(whole, "levels on offer", self.level, "names that differ, each with a noise multiplier and a rate")
        for name, noise, rate in levels:
            require(0 <= noise <= MAX_VALUE, f"noise multiplier of {name!r}", noise, f"from 0 to {MAX_VALUE:g}")
            require(0 <= rate <= 1, f"sampling rate of {name!r}", rate, "from 0 to 1")
        for (name, noise, rate), (other, more, rarer) in itertools.combinations(levels, 2):
            rule = f"listed before {name!r}, which has less noise: the strictest comes first"
            require(not (more > noise and rarer <= rate), "level", other, rule)


class Choice(NamedTuple):
    """What a client says before training: its level, an identity that outlives its connection, whether it is spent."""

    level: str | None
    client: str | None
    spent: bool = False  # its own budget allows no further round


class Refused(ValueError):
    """A reply that does not count, and the kind of thing that is wrong with it."""

    def __init__(self, kind: str, why: str = "") -> None:
        super().__init__(f"{kind}: {why}" if why else kind)
        self.kind = kind


class Declined(Exception):
    """A client that does not want to take part in a round; it counts as absent."""


class Reply(NamedTuple):
    """A reply that was found in order; the update is one row, in the order of the model's arrays."""

    update_P: np.ndarray | None
    scores: dict[str, float]


def flat(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """A model as one row."""
    return np.concatenate([np.ravel(array) for array in arrays.values()]).astype(np.float32, copy=False)


def unflat(row_P: np.ndarray, like: Mapping[str, np.ndarray]) -> Arrays:
    """A row as a model of these names and shapes."""
    ends = np.cumsum([array.size for array in like.values()])
    parts = np.split(np.asarray(row_P, np.float32), ends[:-1])
    return {name: part.reshape(array.shape) for (name, array), part in zip(like.items(), parts)}


def shapes(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    """What kind of model it is: the names of its arrays and their shapes."""
    return {name: array.shape for name, array in arrays.items()}


def as_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """A model as Flower carries it."""
    return ArrayRecord({name: Array(np.asarray(array, np.float32)) for name, array in arrays.items()})


def from_record(record: ArrayRecord) -> Arrays:
    """A model as it came from the server."""
    return {name: array.numpy() for name, array in record.items()}


def ask_choice(node: int, offer: Offer, ttl: float) -> Message:
    """The question that comes before training."""
    return Message(RecordDict({"offer": ConfigRecord(msgspec.to_builtins(offer))}), node, MessageType.QUERY, ttl=ttl)


def read_offer(message: Message) -> Offer:
    """What a client can choose from."""
    return msgspec.convert(dict(message.content.config_records["offer"]), Offer)


def tell_choice(message: Message, choice: Choice) -> Message:
    """A client's answer; what it does not say is left out."""
    said = {key: value for key, value in choice._asdict().items() if value is not None}
    return Message(RecordDict({"choice": ConfigRecord(said)}), reply_to=message)


def read_choice(message: Message | None) -> Choice:
    """What a client said; one that did not answer, or not in order, has said nothing."""
    if message is None or not message.has_content() or not isinstance(message.content.get("choice"), ConfigRecord):
        return Choice(None, None)
    said = message.content.config_records["choice"]
    level, client, spent = (said.get(key) for key in Choice._fields)
    if not (isinstance(client, str) and len(client) <= 64 and client.isascii() and client.isalnum()):
        client = None
    return Choice(level if isinstance(level, str) else None, client, spent is True)


def order_message(kind: str, node: int, model: ArrayRecord, order: Order, ttl: float) -> Message:
    """A message that asks a client to train or to evaluate."""
    content = RecordDict({"global": model, "order": ConfigRecord(msgspec.to_builtins(order))})
    return Message(content, node, kind, ttl=ttl, group_id=str(order.round))


def read_order(message: Message) -> tuple[Arrays, Order]:
    """The global model and what is to be done with it."""
    record = message.content.config_records["order"]
    return from_record(message.content.array_records["global"]), msgspec.convert(dict(record), Order)


def reply_message(message: Message, order: Order, update: Arrays | None, scores: Mapping[str, float]) -> Message:
    """The update, the scores that were asked for, and nothing else."""
    content: dict[str, Any] = {"order": ConfigRecord({"token": order.token})}
    if update is not None:
        content["update"] = as_record(update)
    if scores:
        content["scores"] = MetricRecord(dict(scores))
    return Message(RecordDict(content), reply_to=message)


def decline_message(message: Message, order: Order, why: str) -> Message:
    """A reply that says why there is no update."""
    return Message(RecordDict({"order": ConfigRecord({"token": order.token, "declined": why})}), reply_to=message)


def read_reply(message: Message, order: Order, like: Mapping[str, np.ndarray], training: bool) -> Reply:
    """What a client replied, or why it does not count."""
    try:
        content, echo = message.content, message.content.config_records["order"]
        if echo.get("token") != order.token:
            raise Refused("replayed", "the token is not this round's")
        if "declined" in echo:
            raise Declined(_printable(str(echo["declined"])))
        allowed = {"order"} | ({"update"} if training else set()) | ({"scores"} if order.evaluate else set())
        if unasked := set(content) - allowed:
            raise Refused("malformed", f"{len(unasked)} records that nobody asked for")
        update_P = _read_update(content.array_records["update"], like) if training else None
        return Reply(update_P, _read_scores(content.metric_records.get("scores", {})))
    except (Refused, Declined):
        raise
    except Exception as error:  # whatever a stranger can provoke is the stranger's reply, never the server's end
        raise Refused("malformed", _printable(f"{type(error).__name__}: {error}")) from error


def _printable(text: str) -> str:
    """What a stranger said, in one line of a log and no more."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:200])


def _read_update(record: ArrayRecord, like: Mapping[str, np.ndarray]) -> np.ndarray:
    if set(record) != set(like):
        raise Refused("malformed", "arrays of other names than the model's")
    row_P = flat({name: _read_array(record[name], array.shape) for name, array in like.items()})
    if not np.isfinite(row_P).all():
        raise Refused("not finite")
    return row_P


def _read_array(array: Array, shape: tuple[int, ...]) -> np.ndarray:
    """One array, its header looked at before any room is made for it."""
    if len(array.data) > 4 * math.prod(shape) + HEADER:
        raise Refused("wrong shape", f"{len(array.data)} bytes where {shape} is expected")
    data = io.BytesIO(array.data)
    version = np.lib.format.read_magic(data)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    found, _, dtype = read_header(data, HEADER)
    if dtype != np.float32:
        raise Refused("wrong dtype", f"{dtype} where float32 is expected")
    if found != shape:
        raise Refused("wrong shape", f"{found} where {shape} is expected")
    return array.numpy()


def _read_scores(record: Mapping[str, Any]) -> dict[str, float]:
    scores = {name: record[name] for name in MODELS if name in record}
    if set(record) - set(scores) or not all(
        isinstance(score, int | float) and abs(score) <= MAX_VALUE for score in scores.values()
    ):
        raise Refused("malformed", f"scores that are not numbers up to {MAX_VALUE:g} of the two models")
    return {name: float(score) for name, score in scores.items()}
