"""The ServerApp: registrations, rounds, checkpoints, and on from there in a new run.

Everything that a run knows is in its folder, in the simulator's format, and in the ledger. A ServerApp that died is
started again with the same ``out``: round, model, clip, optimizer, registrations and what was spent go on from the last
completed round; a round that was under way is charged again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flwr.app import ConfigRecord, Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

import fedhdp
from fedhdp.errors import require
from fedhdp.flower.config import Deployment, from_run_config, from_toml, to_toml
from fedhdp.flower.exchange import gather
from fedhdp.flower.protocol import Arrays, as_record, shapes, unflat
from fedhdp.flower.registry import Registry
from fedhdp.flower.strategy import FedHDP
from fedhdp.privacy.budget import BudgetExhausted, DeploymentBilling, Segment
from fedhdp.privacy.ledger import Ledger
from fedhdp.results import store as results
from fedhdp.results.schema import Summary, VariantResult, account_groups, attach_metrics
from fedhdp.results.store import RunDirectory, VariantDirectory
from fedhdp.results.tables import format_table
from fedhdp.server import averaged_model, initial_state

Score = Callable[[Arrays], float]
VARIANT = "fedhdp"


class Record(msgspec.Struct):
    """What a checkpoint holds beside arrays."""

    members: dict[str, str] = {}
    segments: list[Segment] = []
    dropped_groups: set[str] = set()
    refused: dict[str, dict[str, int]] = {}
    strangers: int = 0
    shapes: dict[str, tuple[int, ...]] = {}  # of the model's arrays


def server_app(start_model: Callable[[Deployment], Arrays], score: Score | None = None) -> ServerApp:
    """A ServerApp for a model: where its arrays start and, if the server has a test set, how good they are."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        logging.getLogger("flwr").propagate = False  # else each line is shown twice once absl has been imported
        deployment = from_run_config(context.run_config)
        summary = serve(grid, deployment, start_model(deployment), score)
        for line in format_table(summary.variants).splitlines():
            log(INFO, "%s", line)

    return app


def serve(grid: Grid, deployment: Deployment, start_model: Arrays, score: Score | None = None) -> Summary:
    """Run a deployment to its end, from wherever its folder says that it is."""
    out = Path(deployment.out)
    if not isinstance(start_model, dict):
        raise TypeError(f"a model is a dictionary of named NumPy arrays, not a {type(start_model).__name__}")
    finite = len(start_model) > 0 and all(np.isfinite(array).all() for array in start_model.values())
    require(finite, "start model", sorted(start_model), "of one array or more, all finite")
    with _folder(out, deployment) as folder, Ledger(deployment.ledger) as ledger:
        if (out / results.SUMMARY).exists():
            log(WARNING, "%s holds a run that is finished", out)
            return results.read_value(out / results.SUMMARY, Summary)
        part = folder.variant(VARIANT)
        result = part.result() or _serve(grid, deployment, folder.id, part, ledger, start_model, score)
        summary = Summary(deployment.name, result.seconds, [result], fedhdp.__version__)
        results.write_value(out / results.SUMMARY, summary)
        return summary


def start_billing(
    deployment: Deployment, ledger: Ledger, run: str, segments: Iterable[Segment] = (), dropped: Iterable[str] = ()
) -> DeploymentBilling:
    """The billing of a deployment's run, from where it stands."""
    return DeploymentBilling(
        ledger,
        run,
        segments,
        dropped,
        build_mechanism=deployment.mechanism,
        delta_of=deployment.delta_of,
        repeatable=deployment.repeatable,
        on_exhausted=deployment.on_budget_exhausted,
        budgets=deployment.budgets,
    )


def _folder(out: Path, deployment: Deployment) -> RunDirectory:
    said = to_toml(deployment)
    if not (out / results.EXPERIMENT).exists():
        return RunDirectory.create(out, said)
    folder = RunDirectory.open(out)
    begun = from_toml((out / results.EXPERIMENT).read_text(encoding="utf-8"))
    if differing := deployment.differs(begun):
        folder.__exit__()
        other = f"a run of another deployment: {', '.join(differing)} differ"
        raise ValueError(f"{out} holds {other}; name another folder, or run that one to its end")
    return folder


def _serve(
    grid: Grid,
    deployment: Deployment,
    run: str,
    part: VariantDirectory,
    ledger: Ledger,
    start_model: Arrays,
    score: Score | None,
) -> VariantResult:
    begun, checkpoint = time.monotonic(), part.checkpoint()
    record = Record() if checkpoint is None else _record(checkpoint)
    before = 0.0 if checkpoint is None else float(checkpoint["seconds"])
    registry = Registry(deployment, ledger, run, record.members)
    billing = start_billing(deployment, ledger, run, record.segments, record.dropped_groups)
    strategy = FedHDP(deployment, registry, billing, run, start_model, score)
    strategy.summary()
    registry.wait_for_enough(grid)
    if checkpoint is not None:
        _restore(strategy, checkpoint, record)
        log(INFO, "going on after round %d", strategy.round)
    strategy.let_in(grid)
    part.restart_history(part.history(until=strategy.round) if checkpoint is not None else [])

    def keep() -> None:
        seconds = np.array(before + time.monotonic() - begun)
        part.keep_checkpoint(_pack(strategy) | {"seconds": seconds})

    keep()
    stopped = _play(grid, strategy, part, keep)
    seconds = before + time.monotonic() - begun
    groups = account_groups(billing.full_mechanism, billing.spent, deployment.delta_of)
    result = VariantResult(VARIANT, "fedhdp", strategy.round, seconds, deployment.repeatable, groups, stopped=stopped)
    result = attach_metrics(result, part.history())
    part.finish(_parameters(strategy), result)
    return result


def _play(grid: Grid, strategy: FedHDP, part: VariantDirectory, keep: Callable[[], None]) -> str | None:
    """The rounds that are left, and the evaluation at the end; why it ended early, if it did."""
    deployment, stopped, nothing = strategy.deployment, None, ConfigRecord()
    while strategy.round < deployment.rounds:
        number = strategy.round + 1
        try:
            messages = strategy.configure_train(number, as_record(strategy.model), nothing, grid)
        except BudgetExhausted as error:
            stopped = str(error)
            log(WARNING, "stopping after round %d: %s", strategy.round, stopped)
            break
        strategy.aggregate_train(number, gather(grid, messages, deployment.reply_seconds))
        part.append_history(strategy.rows)
        keep()
    messages = strategy.configure_evaluate(deployment.rounds, as_record(strategy.model), nothing, grid)
    strategy.aggregate_evaluate(deployment.rounds, gather(grid, messages, deployment.reply_seconds))
    part.append_history(strategy.rows)
    return stopped


def _pack(strategy: FedHDP) -> dict[str, np.ndarray]:
    billing, registry = strategy.billing, strategy.registry
    refused = {name: dict(counts) for name, counts in strategy.refused.items()}
    kind = shapes(strategy.like)
    record = Record(registry.members, billing.segments, billing.dropped_groups, refused, strategy.strangers, kind)
    arrays = {f"server_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(strategy.state))}
    text = np.frombuffer(msgspec.json.encode(record), np.uint8)
    return arrays | {"round": np.array(strategy.round), "record": text}


def _record(checkpoint: dict[str, np.ndarray]) -> Record:
    return msgspec.json.decode(checkpoint["record"].tobytes(), type=Record)


def _restore(strategy: FedHDP, checkpoint: dict[str, np.ndarray], record: Record) -> None:
    if record.shapes not in ({}, shapes(strategy.like)):
        raise ValueError(f"the checkpoint is of another model: {record.shapes}, not {shapes(strategy.like)}")
    mechanism = record.segments[-1].mechanism
    like = initial_state(mechanism, strategy.deployment.server, jnp.asarray(checkpoint["server_0"]))
    leaves, tree = jax.tree.flatten(like)
    strategy.state = jax.tree.unflatten(tree, [checkpoint[f"server_{i}"] for i in range(len(leaves))])
    strategy.round = int(checkpoint["round"])
    strategy.refused |= {name: Counter(counts) for name, counts in record.refused.items()}
    strategy.strangers = record.strangers


def _parameters(strategy: FedHDP) -> Arrays:
    """The global model, and its average if there is one, by parameter."""
    named = {f"global/{name}": array for name, array in strategy.model.items()}
    if strategy.deployment.server.average is not None:
        assert strategy.state is not None
        average = unflat(np.asarray(averaged_model(strategy.deployment.server, strategy.state)), strategy.like)
        named |= {f"average/{name}": array for name, array in average.items()}
    return named
