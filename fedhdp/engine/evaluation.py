"""How good models are: on the server's test set, on the clients' own examples, and with the pull that each client chooses.

Axis letters: K clients, C slots, R runs, V mechanisms, T scores of a client (R global models, then V personal ones), N
examples, P parameters.
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
from fedhdp.models import Array

PersonalStore = ShardedPersonalModels | MemoryMappedPersonalModels
CHUNK = 1024  # clients whose personal models are read from a file at a time


class Evaluation:
    """The test sets of all clients and of the server on the devices.

    Args:
        engine: The engine that scores models.
        data: The test sets.
        group_K: Each client's group.
        run_of: Each mechanism's run.
    """

    def __init__(self, engine: Engine, data: FederatedData, group_K: np.ndarray, run_of: Sequence[int]):
        self.engine, self.data, self.group_K, self.run_of = engine, data, group_K, run_of

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

    def on_server(self, theta_RP: Array) -> np.ndarray:
        """Each global model's mean score on the server's test set, which is not empty."""
        score_NR = self.engine.fetch(self.engine.scores(theta_RP, *self._server_test))
        return score_NR[: len(self.data.server_y_N)].mean(axis=0)

    def on_clients(
        self, models: Mapping[str, Array], participated_K: np.ndarray, store: PersonalStore | None
    ) -> dict[str, np.ndarray]:
        """Each client's mean scores on its test examples.

        Args:
            models: The global models of all runs, and their averages if there are such, by "global" and "average".
            participated_K: The clients who have personal models.
            store: The personal models, if training personalizes.

        Returns:
            By ``MODEL/METRIC``, score_KV: a client's score under each mechanism. NaN without examples.
        """
        theta_RP = models["global"]
        runs = len(theta_RP)
        score_KT = self._scores(theta_RP, participated_K, store, self._test)
        scores = {"global": score_KT[:, self.run_of]}
        if "average" in models:
            scores["average"] = self._scores(models["average"], participated_K, None, self._test)[:, self.run_of]
        if store is not None:
            scores["personal"] = score_KT[:, runs:]
            if self.data.validation is not None:
                held_out_KT = self._scores(theta_RP, participated_K, store, self._validation)
                scores["chosen"] = choose_pulls(self.run_of, held_out_KT[:, runs:], scores["personal"])
        return {f"{model}/accuracy": score_KV for model, score_KV in scores.items()}

    def _scores(
        self, theta_RP: Array, participated_K: np.ndarray, store: PersonalStore | None, examples: ShardedExamples
    ) -> np.ndarray:
        """Each client's score of every global model, then of its personal ones."""
        engine, count_K = self.engine, examples.count_K
        clients = np.flatnonzero(count_K)
        models = len(theta_RP) + (0 if store is None else len(engine.run_V))
        score_KT = np.full((self.data.num_clients, models), np.nan)
        chunk = CHUNK if isinstance(store, MemoryMappedPersonalModels) else max(len(clients), 1)
        for first in range(0, len(clients), chunk):
            shares = partition_by_owner(engine, clients[first : first + chunk])
            layout = assign_slots(shares, engine.padded_cohort_size(max(map(len, shares))))
            x_N, y_N, start_C = examples.fetch(layout)
            personal, row_C = (None, layout.place_C) if store is None else store.checkout(layout)
            table = make_slot_table(engine, layout, self.group_K, start_C, count_K, row_C, participated_K)
            score_CT = engine.fetch(engine.client_scores(int(count_K.max()), theta_RP, personal, x_N, y_N, table))
            score_KT[layout.client_C[layout.is_participating_C]] = score_CT[layout.is_participating_C]
            if store is not None and personal is not None:
                store.release(personal)
        return score_KT


def choose_pulls(run_of: Sequence[int], held_out_KV: np.ndarray, score_KV: np.ndarray) -> np.ndarray:
    """The test scores when each client chooses the pull of a run that is best on its held-out examples."""
    chosen_KV, run_V = np.empty_like(score_KV), np.array(run_of)
    for run in set(run_of):
        of_run = np.flatnonzero(run_V == run)
        best_K = of_run[np.nan_to_num(held_out_KV[:, of_run], nan=-np.inf).argmax(axis=1)]
        chosen_KV[:, of_run] = score_KV[np.arange(len(score_KV)), best_K][:, None]
    return chosen_KV
