"""Rounds of federated learning on one machine: `Simulation`, and `simulate` for a whole training."""

from fedhdp.engine.personal_store import StateArrays, personal_bytes_limit
from fedhdp.simulation.run import simulate, simulate_many
from fedhdp.simulation.simulation import Simulation

__all__ = ["Simulation", "StateArrays", "personal_bytes_limit", "simulate", "simulate_many"]
