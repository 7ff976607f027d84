"""Trials without other processes: damaged ledgers, and mutated experiments, archives and replies."""

from __future__ import annotations

import contextlib
import io
import random
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from common import COSTS, EXPERIMENT, MECHANISM, Failure, hold, mutate, refusal, spending, unexpected

from fedhdp.archives import read_npz
from fedhdp.errors import FedHDPError
from fedhdp.experiments import EXPERIMENTS
from fedhdp.experiments.sweep import expand
from fedhdp.experiments.toml import find, from_toml, to_toml
from fedhdp.privacy.backup import restore
from fedhdp.privacy.ledger import Ledger

SLOW = 60.0  # seconds in which an experiment's file must have been read or refused
VALUES = [
    "1",
    "3",
    "0.5",
    "1e-6",
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e-400",
    '""',
    '"\\u0000"',
    "[]",
    "{}",
    "true",
]
VALUES += ["1979-05-27", "9223372036854775807", "9223372036854775808", '"strict"', '["a", 1]', "[[]]", "{ a = 1 }"]


def damaged_ledger(folder: Path, rng: random.Random) -> Counter[str]:
    """A damaged ledger is refused and restored, or says what it said; also beside the journal of a killed transaction."""
    path, results = folder / "a.ledger", Counter[str]()
    with Ledger(path) as ledger:
        ledger.begin("run", MECHANISM)
        ledger.promise("strict", 5.0, 1e-5)
        for _ in range(rng.randrange(1, 6)):
            ledger.charge("run", COSTS)
        expected, content = spending(path), path.read_bytes()
        ledger._db.execute("PRAGMA cache_size = 1")  # so that pages are in the file before the transaction ends
        with contextlib.suppress(Failure), ledger._transaction():
            ledger._add_clients([(f"new {number}", "lax") for number in range(2000)])
            journal = Path(f"{path}-journal").read_bytes()
            killed = path.read_bytes()
            raise Failure  # which rolls it back
    for number in range(40):
        copy = folder / f"{number}.ledger"
        copy.write_bytes(mutate(content, rng))
        kind = ("file", "file", "file", "rows", "transaction")[number % 5]
        if kind == "rows":
            copy.write_bytes(content)
            with contextlib.closing(sqlite3.connect(copy)) as database, database:
                table = rng.choice(("groups", "clients", "runs", "charges", "journal"))
                rows = database.execute(f"SELECT rowid FROM {table}").fetchall()
                database.execute(f"DELETE FROM {table} WHERE rowid = ?", rng.choice(rows))
        elif kind == "transaction":
            copy.write_bytes(killed)
            Path(f"{copy}-journal").write_bytes(journal if number == 4 else mutate(journal, rng))
        elif number == 0:
            copy.write_bytes(b"")
        try:
            stored = spending(copy)
            with Ledger(copy) as ledger:
                ledger.charge("run", COSTS)
        except FedHDPError as error:
            refusal(error)
            hold(number != 4, f"a killed transaction is not rolled back: {error}")
            restore(path, copy)
            hold(spending(copy) == expected, "a ledger that was restored says something else")
            results["refused"] += 1
            results["restored"] += 1
        else:
            hold(stored == expected, f"a ledger with a damaged {kind} says something else")
            hold(kind != "rows" and number != 0, f"a ledger with a damaged {kind} is opened")
            results["unharmed"] += 1
    return results


def mutated_experiment(folder: Path, rng: random.Random) -> Counter[str]:
    """A mutated experiment's file is read, its mechanisms built, and written as it was; or it is refused in one line."""
    results, path = Counter[str](), folder / "my.toml"
    texts = [EXPERIMENT, EXPERIMENT, *(to_toml(EXPERIMENTS[name]()) for name in sorted(EXPERIMENTS))]
    for _ in range(500):
        content = rng.choice(texts).encode()
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            change = rng.choices((with_value, with_digit, mutate), (0.5, 0.3, 0.2))[0]
            content = change(content, rng)
        path.write_bytes(content)
        begun = time.monotonic()
        try:
            experiment = find(str(path), {})
            for part in expand(experiment).values():
                part.pin().build_mechanism()
            hold(from_toml(to_toml(experiment), "my.toml") == experiment, f"it is written otherwise: {content!r}")
            results["read"] += 1
        except FedHDPError as error:
            refusal(error)
            results["refused"] += 1
        except Failure:
            raise
        except Exception as error:
            raise unexpected(error, content) from error
        seconds = time.monotonic() - begun
        hold(seconds < SLOW, f"{seconds:.0f} s for {content!r}")
    return results


def with_value(content: bytes, rng: random.Random) -> bytes:
    """An experiment's file with another value for one key, of a line or of a table in a line."""
    parts = content.decode(errors="surrogateescape").split(" = ")
    if len(parts) == 1:
        return content
    place = rng.randrange(1, len(parts))
    value = rng.choice([*VALUES, "9" * rng.randint(1, 400)])
    ends = [parts[place].find(end) for end in (",", " }", "\n") if end in parts[place]]
    parts[place] = value + parts[place][min(ends, default=len(parts[place])) :]
    return " = ".join(parts).encode(errors="surrogateescape")


def with_digit(content: bytes, rng: random.Random) -> bytes:
    """An experiment's file with another digit, sign or point in one place."""
    places = [place for place, byte in enumerate(content) if chr(byte) in "0123456789.-"]
    if not places:
        return content
    place, length = rng.choice(places), rng.choice((0, 1, 1, 1))
    return content[:place] + rng.choice((b"0", b"1", b"9", b"-", b".", b"e", b"00", b"")) + content[place + length :]


def mutated_archive(folder: Path, rng: random.Random) -> Counter[str]:
    """A mutated archive is refused, or has the arrays that it had."""
    path, results = folder / "a.npz", Counter[str]()
    arrays = {"x": np.random.default_rng(0).normal(size=(50, 7)), "y": np.arange(50), "client": np.arange(50) % 5}
    contents = []
    for save in (np.savez_compressed, np.savez):
        file = io.BytesIO()
        save(file, **arrays)  # type: ignore[arg-type]
        contents.append(file.getvalue())
    for _ in range(200):
        path.write_bytes(mutate(rng.choice(contents), rng))
        try:
            stored = read_npz(path)
        except ValueError as error:
            hold("\n" not in str(error), repr(error))
            results["refused"] += 1
            continue
        except Exception as error:
            raise unexpected(error, path.read_bytes()) from error
        for name in stored.keys() & arrays.keys():
            same = stored[name].dtype == arrays[name].dtype and np.array_equal(stored[name], arrays[name])
            hold(same, f"{name} has other values")
        results["unharmed"] += 1
    return results


def mutated_reply(folder: Path, rng: random.Random) -> Counter[str]:
    """A mutated reply of a Flower client is refused, or is finite numbers of the model's size; an enrollment too."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return Counter({"skipped: no Flower": 1})
    from fedhdp.flower import protocol

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as in a ServerApp's process
    results = Counter[str]()
    for number in range(200):
        try:
            of_kind = (_update, _update, _moments, _enrollment)[number % 4]
            results[of_kind(rng)] += 1
        except protocol.DeclinedRound:
            results["declined"] += 1
        except protocol.RefusedReply as error:
            hold("\n" not in str(error), repr(error))
            results["refused"] += 1
        except Failure:
            raise
        except Exception as error:
            raise unexpected(error, of_kind.__name__) from error
    return results


def _update(rng: random.Random) -> str:
    """An update, with scores."""
    from flwr.app import MetricRecord

    from fedhdp.flower import protocol

    model = {"w": np.zeros((5, 4), np.float32), "b": np.zeros(4, np.float32)}
    request = protocol.RoundRequest("token", "run", 0, 1, "strict", 1.0, 0.5, 0.05, metrics=["accuracy"])
    message = protocol.request_message("train", 1, protocol.to_record(model), request, 60)
    message.metadata.__dict__["_message_id"] = "1"
    update = {name: np.ones_like(array) for name, array in model.items()}
    reply = protocol.reply_message(message, request, update, {"global/accuracy": 0.5})
    _mutate_records(reply, "update", rng)
    if rng.random() < 0.2:
        values = {rng.choice(["global/accuracy", "x"]): rng.choice([float("nan"), 1e300, [0.5, 2.0], -1])}
        reply.content["scores"] = MetricRecord(values)  # type: ignore[arg-type]
    row_P = protocol.parse_reply(reply, request, model, is_training=True).update_P
    hold(row_P is not None and row_P.shape == (24,) and bool(np.isfinite(row_P).all()), "an update of another shape")
    return "taken"


def _moments(rng: random.Random) -> str:
    """Second moments of a client who opted out."""
    from fedhdp.basis import Moments
    from fedhdp.flower import protocol

    request = protocol.RoundRequest("token", "run", 0, 1, "open", 0.0, 0.5, 0.05)
    message = protocol.moments_request(1, request, 60)
    message.metadata.__dict__["_message_id"] = "1"
    reply = protocol.moments_message(message, request, Moments(np.eye(3), 5))
    if rng.random() < 0.2:
        reply.content["request"]["examples"] = rng.choice([0, -1, 2**62, 1.5, "5", b"5"])
    _mutate_records(reply, "moments", rng)
    moments = protocol.parse_moments(reply, request, rng.choice([None, 3]))
    hold(moments.sum_FF.ndim == 2 and bool(np.isfinite(moments.sum_FF).all()), "moments of another shape")
    return "taken"


def _enrollment(rng: random.Random) -> str:
    """A client's level and id."""
    from flwr.app import ConfigRecord

    from fedhdp.flower import protocol

    offer = protocol.LevelOffer("run", 0, ["strict", "lax"], [2.0, 1.0], [0.1, 0.1])
    message = protocol.offer_message(1, offer, 60)
    message.metadata.__dict__["_message_id"] = "1"
    reply = protocol.enrollment_message(message, protocol.Enrollment("lax", "abc"))
    values: list[Any] = ["", "x" * 10**4, "a/b", "a\n", "\0", 1, 1.5, True, b"abc", [1, 2], "é"]
    record = {key: rng.choice(values) for key in ("level", "client_id", "budget_exhausted", "x") if rng.random() < 0.7}
    reply.content["enrollment" if rng.random() < 0.9 else "other"] = ConfigRecord(record)
    enrollment = protocol.parse_enrollment(reply)
    is_id = enrollment.client_id is None or bool(protocol.CLIENT_ID.fullmatch(enrollment.client_id))
    hold(is_id and isinstance(enrollment.level, str | None), "an enrollment that is none")
    return "taken"


def _mutate_records(reply: Any, name: str, rng: random.Random) -> None:
    """Damage the arrays of a reply, or the record beside them."""
    from flwr.app import ConfigRecord

    record = reply.content.array_records[name]
    names, kind = sorted(record), rng.randrange(5)
    array = record[rng.choice(names)]
    if kind == 0:
        array.data = mutate(array.data, rng)
    elif kind == 1:
        record[rng.choice([*names, "x"])] = record[rng.choice(names)]
    elif kind == 2:
        token = rng.choice([7, "", "other", b"token", 1.5, [1, 2]])
        reply.content["request"] = ConfigRecord({"token": token, "declined": rng.choice([1, "x" * 10**4, [1.0]])})
    elif kind == 3:
        array.dtype, array.shape = rng.choice([("int64", (4,)), ("float32", (10**9,)), ("", ()), ("float32", (-1, 4))])
    else:
        del reply.content[rng.choice(sorted(reply.content))]
