"""Federated learning in which every client chooses its own differential privacy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from fedhdp.algorithms import dp_fedavg as dp_fedavg
    from fedhdp.algorithms import fedhdp as fedhdp
    from fedhdp.algorithms import hdp_fedavg as hdp_fedavg
    from fedhdp.algorithms import local_only as local_only
    from fedhdp.algorithms import non_private as non_private
    from fedhdp.client import LocalTraining as LocalTraining
    from fedhdp.clips import AdaptiveClip as AdaptiveClip
    from fedhdp.clips import LayerClip as LayerClip
    from fedhdp.data import FederatedData as FederatedData
    from fedhdp.devices import use_cpu_cores as use_cpu_cores
    from fedhdp.mechanism import Mechanism as Mechanism
    from fedhdp.mechanism import PrivacyGroup as PrivacyGroup
    from fedhdp.metrics import Metric as Metric
    from fedhdp.models import Model as Model
    from fedhdp.models import cnn as cnn
    from fedhdp.models import linear as linear
    from fedhdp.models import mlp as mlp
    from fedhdp.optimizers import OptimizerConfig as OptimizerConfig
    from fedhdp.privacy.accounting import epsilon as epsilon
    from fedhdp.privacy.calibration import calibrate as calibrate
    from fedhdp.privacy.ledger import Ledger as Ledger
    from fedhdp.server import ServerOptimizer as ServerOptimizer
    from fedhdp.simulation import Simulation as Simulation
    from fedhdp.simulation import simulate as simulate
    from fedhdp.simulation import simulate_many as simulate_many

# A name is imported when it is first used, so that accounting does not wait for JAX.
_MODULES = {
    "fedhdp.algorithms": ("fedhdp", "dp_fedavg", "hdp_fedavg", "non_private", "local_only"),
    "fedhdp.client": ("LocalTraining",),
    "fedhdp.clips": ("AdaptiveClip", "LayerClip"),
    "fedhdp.data": ("FederatedData",),
    "fedhdp.devices": ("use_cpu_cores",),
    "fedhdp.mechanism": ("Mechanism", "PrivacyGroup"),
    "fedhdp.metrics": ("Metric",),
    "fedhdp.models": ("Model", "mlp", "cnn", "linear"),
    "fedhdp.optimizers": ("OptimizerConfig",),
    "fedhdp.privacy.accounting": ("epsilon",),
    "fedhdp.privacy.calibration": ("calibrate",),
    "fedhdp.privacy.ledger": ("Ledger",),
    "fedhdp.server": ("ServerOptimizer",),
    "fedhdp.simulation": ("Simulation", "simulate", "simulate_many"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
