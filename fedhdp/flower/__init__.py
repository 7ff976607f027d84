"""FedHDP deployed on Flower: the ``Mechanism``, ``server.py`` and ``client.py`` of the simulator, over Flower's messages.

An app needs these names only::

    from fedhdp.flower import Deployment, Trainer, client_app, server_app
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhdp.flower.clientapp import Trainer as Trainer
    from fedhdp.flower.clientapp import client_app as client_app
    from fedhdp.flower.clientapp import configured_level as configured_level
    from fedhdp.flower.config import Deployment as Deployment
    from fedhdp.flower.protocol import Arrays as Arrays
    from fedhdp.flower.serverapp import run_deployment as run_deployment
    from fedhdp.flower.serverapp import server_app as server_app
    from fedhdp.flower.strategy import FedHDP as FedHDP
    from fedhdp.flower.trainer import initial_arrays as initial_arrays
    from fedhdp.flower.trainer import jax_trainer as jax_trainer
    from fedhdp.flower.trainer import scorer as scorer

# A name is imported when it is first used: a client does not load the server, and a Deployment needs no Flower. Modules are
# called clientapp and serverapp, as Flower's, because a module called client_app would hide the function.
_MODULES = {
    "clientapp": ("Trainer", "client_app", "configured_level"),
    "config": ("Deployment",),
    "protocol": ("Arrays",),
    "serverapp": ("run_deployment", "server_app"),
    "strategy": ("FedHDP",),
    "trainer": ("initial_arrays", "jax_trainer", "scorer"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        message = f"fedhdp.flower.{name} needs Flower: pip install 'fedhdp[flower]'"
        raise ModuleNotFoundError(message, name=error.name) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
