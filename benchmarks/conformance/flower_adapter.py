"""Flower 1.41: its wrappers for clipping and noise on the server, around its federated averaging."""

from __future__ import annotations

import logging
import os

import claims as w

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.supercore.task_identity import TaskIdentity

from fedhdp.privacy.audit import ReleaseClaim

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in a ServerApp
logging.getLogger("flwr").setLevel(logging.ERROR)


def aggregate(strategy, cohort, update_CP, seed):
    """One round of a strategy, from a global model of zeros."""
    np.random.seed(seed)
    strategy.current_arrays = ArrayRecord({"model": Array(np.zeros(update_CP.shape[1], np.float32))})
    replies = []
    for client, update_P, examples in zip(cohort, update_CP, w.example_counts(cohort), strict=True):
        request = Message(RecordDict(), dst_node_id=int(client) + 1, message_type="train")
        arrays, metrics = ArrayRecord({"model": Array(update_P)}), MetricRecord({"num-examples": examples})
        replies.append(Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=request))
    arrays, _ = strategy.aggregate_train(1, replies)
    return arrays["model"].numpy()


def fixed(cohort, update_CP, seed):
    """A release with the fixed clip."""
    strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), w.NOISE_MULTIPLIER, w.CLIP, w.COHORT)
    return aggregate(strategy, cohort, update_CP, seed)


def adaptive_strategy():
    """The strategy with the adaptive clip, before its first round."""
    return DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(), w.NOISE_MULTIPLIER, w.COHORT, w.CLIP, w.QUANTILE, w.CLIP_RATE, w.BIT_NOISE
    )


def adaptive(cohort, update_CP, seed):
    """A release with the adaptive clip, and the next clip."""
    strategy = adaptive_strategy()
    return aggregate(strategy, cohort, update_CP, seed), strategy.clipping_norm


FIXED_CLAIM = ReleaseClaim(w.CLIP, w.NOISE_MULTIPLIER, w.COHORT)
ADAPTIVE_CLAIM = ReleaseClaim(w.CLIP, adaptive_strategy().noise_multiplier, w.COHORT, adaptive=True)

if __name__ == "__main__":
    w.check("Flower 1.41, fixed clipping", fixed, FIXED_CLAIM)
    w.check("Flower 1.41, adaptive clipping", adaptive, ADAPTIVE_CLAIM)
