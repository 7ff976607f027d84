"""The ServerApp: enrollment, rounds, checkpoints, and resuming.

The state of a run is in its run directory, in the simulator's format, and in the ledger. When a ServerApp has died, start it
again with the same ``out``: it resumes after the last completed round. A round that was under way is charged again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from logging import INFO, WARNING
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from fedhdp.errors import ModelError, RunError
from fedhdp.experiments.bases import describe_basis
from fedhdp.flower.config import Deployment
from fedhdp.flower.protocol import BASIS, Arrays, Score, array_shapes, send_and_gather, to_record, unflatten
from fedhdp.flower.registry import Registry, WaitLog
from fedhdp.flower.strategy import FedHDP, layers_of, metric_infos
from fedhdp.privacy.accounting import LEDGER_ACCOUNTANT
from fedhdp.privacy.budget import BudgetExhausted, DeploymentBilling, Segment
from fedhdp.privacy.ledger import Ledger
from fedhdp.results import store
from fedhdp.results.provenance import provenance
from fedhdp.results.schema import Summary, VariantResult, account_groups, attach_metrics
from fedhdp.results.store import RunDirectory, VariantDirectory
from fedhdp.results.tables import format_table
from fedhdp.server import averaged_model, initial_state

VARIANT = "fedhdp"


class CheckpointRecord(msgspec.Struct):
    """The part of a checkpoint that is not arrays."""

    members: dict[str, str] = {}
    segments: list[Segment] = []
    dropped_groups: set[str] = set()
    refused: dict[str, dict[str, int]] = {}
    unsolicited: int = 0
    shapes: dict[str, tuple[int, ...]] = {}  # of the model's arrays


def server_app(initial_arrays: Callable[[Deployment], Arrays], score: Score | None = None) -> ServerApp:
    """A ServerApp that trains a model with FedHDP.

    Args:
        initial_arrays: Returns the initial model as named float32 arrays.
        score: Returns a model's metrics on the server's test set by name, or the first one, if there is such a set.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        logging.getLogger("flwr").propagate = False  # once absl is imported, each line would be logged twice
        deployment = Deployment.from_run_config(context.run_config)
        summary = run_deployment(grid, deployment, initial_arrays(deployment), score)
        for line in format_table(summary.variants).splitlines():
            log(INFO, "%s", line)

    return app


def run_deployment(grid: Grid, deployment: Deployment, initial_arrays: Arrays, score: Score | None = None) -> Summary:
    """Run a deployment to its end, or resume it from its run directory.

    Args:
        grid: Flower's connection to the nodes.
        deployment: The configuration.
        initial_arrays: Named float32 arrays.
        score: Returns a model's metrics on the server's test set by name, or the first one.

    Returns:
        The results, which are also in the run directory.

    Raises:
        ModelError: If the initial model is not a dictionary of finite arrays.
        InvalidValueError: If the clip's layers are not those of the model.
        RunError: If the run directory is of another deployment or another model.
        LedgerError: If the ledger is older than the checkpoint.
    """
    _check_model(initial_arrays)
    layers_of(deployment.mechanism(dict.fromkeys(deployment.levels, 1)), initial_arrays)  # before anything is written
    out = Path(deployment.out)
    with _open_run(out, deployment) as directory, Ledger(deployment.ledger) as ledger:
        if (out / store.SUMMARY_FILE).exists():
            log(WARNING, "%s holds a finished run", out)
            return store.read_value(out / store.SUMMARY_FILE, Summary)
        variant = directory.variant(VARIANT)
        result = variant.result()
        if result is None:
            checkpoint = variant.checkpoint() or {}
            record = _read_record(checkpoint)
            registry = Registry(deployment, ledger, directory.id, record.members)
            parameters = sum(array.size for array in initial_arrays.values())
            billing = start_billing(
                deployment, ledger, directory.id, parameters, record.segments, record.dropped_groups
            )
            strategy = FedHDP(deployment, registry, billing, directory.id, initial_arrays, score)
            result = _run(grid, strategy, variant, checkpoint)
        summary = Summary(deployment.name, result.seconds, [result], *provenance())
        store.write_value(out / store.SUMMARY_FILE, summary)
        directory.write_checksums()
        return summary


def start_billing(
    deployment: Deployment,
    ledger: Ledger,
    run: str,
    parameters: int,
    segments: Iterable[Segment] = (),
    dropped: Iterable[str] = (),
) -> DeploymentBilling:
    """The billing of a run of a model with so many parameters, from the segments and dropped groups of a checkpoint."""
    return DeploymentBilling(
        ledger,
        run,
        segments,
        dropped,
        build_mechanism=partial(deployment.mechanism, parameters=parameters),
        delta_of=deployment.delta_of,
        repeatable=deployment.repeatable,
        on_exhausted=deployment.on_budget_exhausted,
        budgets=deployment.budgets,
    )


def _check_model(arrays: Arrays) -> None:
    if not isinstance(arrays, dict):
        kind = type(arrays).__name__
        raise ModelError(f"initial_arrays must be a dictionary of NumPy arrays, got a {kind}", "initial_arrays", arrays)
    if not arrays or not all(np.isfinite(array).all() for array in arrays.values()):
        names = sorted(arrays)
        raise ModelError(f"initial_arrays must be at least one array, all finite, got {names}", "initial_arrays", names)
    if BASIS in arrays:
        raise ModelError(f"initial_arrays must not have {BASIS!r}, the name of a basis", "initial_arrays", BASIS)


def _open_run(out: Path, deployment: Deployment) -> RunDirectory:
    if not (out / store.EXPERIMENT_FILE).exists():
        return RunDirectory.create(out, deployment.to_toml())
    directory = RunDirectory.open(out)
    previous = Deployment.from_toml((out / store.EXPERIMENT_FILE).read_text(encoding="utf-8"))
    if changed := deployment.changed_fields(previous):
        directory.__exit__()
        raise RunError(f"{out} holds a run with another {', '.join(changed)}; choose another out", "out", out)
    return directory


def _run(
    grid: Grid, strategy: FedHDP, variant: VariantDirectory, checkpoint: Mapping[str, np.ndarray]
) -> VariantResult:
    """Enroll clients, run the rounds that are left, and write the result."""
    started = time.monotonic() - (float(checkpoint["seconds"]) if checkpoint else 0.0)
    strategy.summary()
    strategy.registry.wait_for_clients(grid)
    if checkpoint:
        _restore(strategy, checkpoint)
        log(INFO, "resuming after round %d", strategy.round)
    strategy.admit(grid)
    variant.rewrite_history(variant.history(until=strategy.round) if checkpoint else [])

    def save_checkpoint() -> None:
        variant.save_checkpoint(_state_arrays(strategy) | {"seconds": np.array(time.monotonic() - started)})

    save_checkpoint()
    stopped = _run_rounds(grid, strategy, variant, save_checkpoint)
    _evaluate(grid, strategy, variant)
    deployment, billing, seconds = strategy.deployment, strategy.billing, time.monotonic() - started
    targets = deployment.epsilon_targets
    groups = account_groups(billing.full_mechanism, billing.costs, deployment.delta_of, LEDGER_ACCOUNTANT, targets)
    result = VariantResult(VARIANT, "fedhdp", strategy.round, seconds, deployment.repeatable, groups)
    result.metrics, result.stopped = metric_infos(deployment), stopped
    if deployment.basis is not None and strategy.basis is not None:
        result.preparation = describe_basis(deployment.basis, strategy.basis)
    result = attach_metrics(result, variant.history())
    variant.finish(_named_parameters(strategy), result)
    return result


def _run_rounds(
    grid: Grid, strategy: FedHDP, variant: VariantDirectory, save_checkpoint: Callable[[], None]
) -> str | None:
    """Run the rounds that are left; the reason if they end early."""
    deployment = strategy.deployment
    while strategy.round < deployment.rounds:
        server_round = strategy.round + 1
        try:
            messages = strategy.configure_train(server_round, to_record(strategy.model), ConfigRecord(), grid)
        except BudgetExhausted as error:
            log(WARNING, "stopping after round %d: %s", strategy.round, error)
            return str(error)
        strategy.aggregate_train(server_round, _gather(grid, strategy, messages))
        variant.append_history(strategy.metric_rows)
        save_checkpoint()
    return None


def _evaluate(grid: Grid, strategy: FedHDP, variant: VariantDirectory) -> None:
    """Score the final models, on the clients and on the server's test set."""
    deployment = strategy.deployment
    messages = strategy.configure_evaluate(deployment.rounds, to_record(strategy.model), ConfigRecord(), grid)
    strategy.aggregate_evaluate(deployment.rounds, _gather(grid, strategy, messages))
    variant.append_history(strategy.metric_rows)


def _gather(grid: Grid, strategy: FedHDP, messages: list[Message]) -> list[Message]:
    """Send messages and gather the replies; nodes that come in the meantime are queried, for the next round."""
    seconds, wait_log = strategy.deployment.reply_timeout_seconds, WaitLog(delay=30.0)

    def while_waiting(missing: int) -> None:
        strategy.registry.poll(grid)
        wait_log.log(f"{missing} of {len(messages)} clients have not replied; they have {seconds:g} s")

    return send_and_gather(grid, messages, seconds, while_waiting)


def _state_arrays(strategy: FedHDP) -> dict[str, np.ndarray]:
    """The strategy's state, for a checkpoint."""
    record = CheckpointRecord(
        members=strategy.registry.members,
        segments=strategy.billing.segments,
        dropped_groups=strategy.billing.dropped_groups,
        refused={level: dict(counts) for level, counts in strategy.counts.refused.items()},
        unsolicited=strategy.counts.unsolicited,
        shapes=array_shapes(strategy.initial_arrays),
    )
    arrays = {f"server_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(strategy.state))}
    encoded_record = np.frombuffer(msgspec.json.encode(record), np.uint8)
    return arrays | {"round": np.array(strategy.round), "record": encoded_record}


def _read_record(checkpoint: Mapping[str, np.ndarray]) -> CheckpointRecord:
    if not checkpoint:
        return CheckpointRecord()
    return msgspec.json.decode(checkpoint["record"].tobytes(), type=CheckpointRecord)


def _restore(strategy: FedHDP, checkpoint: Mapping[str, np.ndarray]) -> None:
    """Set the strategy's state to the checkpoint's."""
    record, shapes = _read_record(checkpoint), array_shapes(strategy.initial_arrays)
    if record.shapes != shapes:
        raise RunError(f"the checkpoint is of another model: {record.shapes}, not {shapes}", "initial_arrays", shapes)
    mechanism = record.segments[-1].mechanism
    like = initial_state(mechanism, strategy.deployment.server, jnp.asarray(checkpoint["server_0"]))
    leaves, tree = jax.tree.flatten(like)
    strategy.state = jax.tree.unflatten(tree, [checkpoint[f"server_{i}"] for i in range(len(leaves))])
    strategy.round = int(checkpoint["round"])
    strategy.counts.refused |= {level: Counter(counts) for level, counts in record.refused.items()}
    strategy.counts.unsolicited = record.unsolicited


def _named_parameters(strategy: FedHDP) -> Arrays:
    """The global model, and its average if there is one, by parameter."""
    parameters = {f"global/{name}": array for name, array in strategy.model.items()}
    if strategy.deployment.server.average is not None:
        assert strategy.state is not None
        average_P = np.asarray(averaged_model(strategy.deployment.server, strategy.state))
        average = unflatten(average_P, strategy.initial_arrays)
        parameters |= {f"average/{name}": array for name, array in average.items()}
    return parameters
