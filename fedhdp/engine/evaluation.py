"""How good models are: on the server's test set, on the clients' own examples, and with the pull that each client chooses.

Axis letters: K clients, C slots, R runs, V mechanisms, T models of a client (R global ones, then V personal ones), Q
metrics, N examples, M examples of one client (padded), P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from fedhdp.data import FederatedData
from fedhdp.engine.examples import ShardedExamples
from fedhdp.engine.personal_store import MemoryMappedPersonalModels, ShardedPersonalModels
from fedhdp.engine.placement import assign_slots, make_slot_table, partition_by_owner
from fedhdp.engine.round import Engine
from fedhdp.metrics import Metric, measure, measure_one, resolve
from fedhdp.models import Array, Model, squared_error

PersonalStore = ShardedPersonalModels | MemoryMappedPersonalModels
CHUNK = 1024  # clients whose personal models are read from a file at a time
MAX_HOST_ROWS = 2**20  # outputs that are fetched at a time for metrics that run on the host


def model_metrics(model: Model) -> tuple[Metric, ...]:
    """The metrics of a model; where it names none, the mean squared error of a squared error, else the accuracy.

    Raises:
        ModelError: If a metric cannot be used.
    """
    default = "mean_squared_error" if model.loss is squared_error else "accuracy"
    return resolve(model.metrics or (default,), model.loss)


class Evaluation:
    """The test sets of all clients and of the server on the devices.

    Args:
        engine: The engine that applies models.
        data: The test sets.
        group_K: Each client's group.
        run_of: Each mechanism's run.
        metrics: What to measure.
    """

    def __init__(
        self,
        engine: Engine,
        data: FederatedData,
        group_K: np.ndarray,
        run_of: Sequence[int],
        metrics: tuple[Metric, ...],
    ):
        self.engine, self.data, self.group_K, self.run_of, self.metrics = engine, data, group_K, run_of, metrics

    @cached_property
    def _server_test(self) -> tuple[Array, Array]:
        x_N, y_N = self.data.server_x_N, self.data.server_y_N
        padding = -len(y_N) % self.engine.devices
        padded = tuple(np.resize(a, (len(a) + padding, *a.shape[1:])) for a in (x_N, y_N))
        return self.engine.put(padded, self.engine.by_client)

    @cached_property
    def _test(self) -> ShardedExamples:
        return ShardedExamples(self.engine, self.data.test)

    @cached_property
    def _validation(self) -> ShardedExamples:
        assert self.data.validation is not None
        return ShardedExamples(self.engine, self.data.validation)

    def on_server(self, models: Mapping[str, Array]) -> dict[str, np.ndarray]:
        """What each global model measures on the server's test set, by ``MODEL/METRIC``; empty without a test set."""
        count = len(self.data.server_y_N)
        if count == 0:
            return {}
        values: dict[str, np.ndarray] = {}
        for model, theta_RP in models.items():
            value_RQ = np.array([self._of_server(theta_RP[r], count) for r in range(len(theta_RP))])
            values |= {f"{model}/{metric.name}": value_RQ[:, q] for q, metric in enumerate(self.metrics)}
        return values

    def _of_server(self, theta_P: Array, count: int) -> list[float]:
        """What one global model measures on the server's test set."""
        on_devices, on_host = _by_place(self.metrics)
        of_devices = tuple(self.metrics[q] for q in on_devices)
        value_Q, outputs_N = self.engine.server_values(of_devices, theta_P, *self._server_test, count)
        value_of = dict(zip(on_devices.tolist(), self.engine.fetch(value_Q).tolist(), strict=True))
        if len(on_host):
            examples = self.engine.fetch(outputs_N)[:count], self.data.server_y_N
            value_of |= {q: measure_one(self.metrics[q], *examples) for q in on_host.tolist()}
        return [value_of[q] for q in range(len(self.metrics))]

    def on_clients(
        self, models: Mapping[str, Array], participated_K: np.ndarray, store: PersonalStore | None
    ) -> dict[str, np.ndarray]:
        """What each client measures on its test examples.

        Args:
            models: The global models of all runs, and their averages if there are such, by "global" and "average".
            participated_K: The clients who have personal models.
            store: The personal models, if training personalizes.

        Returns:
            By ``MODEL/METRIC``, value_KV: a client's value under each mechanism. NaN where it is undefined, and without
            examples.
        """
        theta_RP = models["global"]
        runs = len(theta_RP)
        value_KTQ = self._values(self.metrics, theta_RP, participated_K, store, self._test)
        values = {"global": value_KTQ[:, self.run_of]}
        if "average" in models:
            average_KTQ = self._values(self.metrics, models["average"], participated_K, None, self._test)
            values["average"] = average_KTQ[:, self.run_of]
        if store is not None:
            values["personal"] = value_KTQ[:, runs:]
            if self.data.validation is not None:
                first = self.metrics[0]
                held_out_KTQ = self._values((first,), theta_RP, participated_K, store, self._validation)
                held_out_KV = held_out_KTQ[:, runs:, 0] * (1 if first.higher_is_better else -1)
                choice_KV = choose_pulls(self.run_of, held_out_KV)
                values["chosen"] = np.take_along_axis(values["personal"], choice_KV[..., None], axis=1)
        names = [metric.name for metric in self.metrics]
        return {f"{model}/{name}": a_KVQ[..., q] for model, a_KVQ in values.items() for q, name in enumerate(names)}

    def _values(
        self,
        metrics: tuple[Metric, ...],
        theta_RP: Array,
        participated_K: np.ndarray,
        store: PersonalStore | None,
        examples: ShardedExamples,
    ) -> np.ndarray:
        """What each client measures with every global model, then with its personal ones."""
        engine, count_K = self.engine, examples.count_K
        clients, capacity = np.flatnonzero(count_K), int(count_K.max(initial=0))
        models = len(theta_RP) + (0 if store is None else len(engine.run_V))
        on_devices, on_host = _by_place(metrics)
        chunk = CHUNK if isinstance(store, MemoryMappedPersonalModels) else max(len(clients), 1)
        if len(on_host):
            chunk = min(chunk, max(1, MAX_HOST_ROWS // (models * capacity)))
        value_KTQ = np.full((self.data.num_clients, models, len(metrics)), np.nan)
        for first in range(0, len(clients), chunk):
            shares = partition_by_owner(engine, clients[first : first + chunk])
            layout = assign_slots(shares, engine.padded_cohort_size(max(map(len, shares))))
            x_N, y_N, start_C = examples.fetch(layout)
            personal, row_C = (None, layout.place_C) if store is None else store.checkout(layout)
            table = make_slot_table(engine, layout, self.group_K, start_C, count_K, row_C, participated_K)
            of_devices, arrays = tuple(metrics[q] for q in on_devices), (theta_RP, personal, x_N, y_N, table)
            value_CTQ, outputs_CTM = engine.client_values(capacity, of_devices, len(on_host) > 0, *arrays)
            slots = np.flatnonzero(layout.is_participating_C)
            client_C = layout.client_C[slots]
            value_KTQ[np.ix_(client_C, np.arange(models), on_devices)] = engine.fetch(value_CTQ)[slots]
            if outputs_CTM is not None:
                outputs_CTM = engine.fetch(outputs_CTM)[slots]
                value_KTQ[np.ix_(client_C, np.arange(models), on_host)] = _host_values(
                    [metrics[q] for q in on_host], outputs_CTM, [examples.source.labels(k) for k in client_C]
                )
            if store is not None and personal is not None:
                store.release(personal)
        return value_KTQ


def _by_place(metrics: Sequence[Metric]) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the metrics that run on the devices, and of those that run on the host."""
    is_on_devices_Q = np.array([metric.on_devices for metric in metrics])
    return np.flatnonzero(is_on_devices_Q), np.flatnonzero(~is_on_devices_Q)


def _host_values(metrics: Sequence[Metric], outputs_CTM: np.ndarray, labels: Sequence[np.ndarray]) -> np.ndarray:
    """Metrics that run on the host: for each client and model, without padding."""
    values = [
        [list(measure(metrics, outputs_M[: len(y_M)], y_M).values()) for outputs_M in outputs_TM]
        for outputs_TM, y_M in zip(outputs_CTM, labels, strict=True)
    ]
    return np.array(values)


def choose_pulls(run_of: Sequence[int], held_out_KV: np.ndarray) -> np.ndarray:
    """For each client and mechanism, the mechanism of the same run that is best on the client's held-out examples."""
    choice_KV, run_V = np.empty(held_out_KV.shape, int), np.array(run_of)
    for run in set(run_of):
        of_run = np.flatnonzero(run_V == run)
        best_K = of_run[np.nan_to_num(held_out_KV[:, of_run], nan=-np.inf).argmax(axis=1)]
        choice_KV[:, of_run] = best_K[:, None]
    return choice_KV
