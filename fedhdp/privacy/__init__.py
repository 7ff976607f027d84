"""The cost of a promise: accounting, calibration, budgets and the ledger; no JAX.

Importing it does not import dp_accounting, which takes most of a second: that happens when an epsilon is computed.
"""

from fedhdp.privacy.accounting import EpsilonReport, epsilon, epsilon_reports
from fedhdp.privacy.budget import BudgetExhausted, DeploymentBilling, OnBudgetExhausted, RunBilling, drop_groups
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig, PrivacyLevel, calibrate
from fedhdp.privacy.costs import PrivacyCost, privacy_costs
from fedhdp.privacy.ledger import Budget, BudgetError, Ledger
from fedhdp.privacy.reports import account_levels, account_mechanisms, group_standing
from fedhdp.privacy.rounds import account_rounds
from fedhdp.privacy.tuning import Tuning, tuning_reports

__all__ = [
    "Budget",
    "BudgetError",
    "BudgetExhausted",
    "DeploymentBilling",
    "EpsilonReport",
    "GroupConfig",
    "Ledger",
    "MechanismConfig",
    "OnBudgetExhausted",
    "PrivacyCost",
    "PrivacyLevel",
    "RunBilling",
    "Tuning",
    "account_levels",
    "account_mechanisms",
    "account_rounds",
    "calibrate",
    "drop_groups",
    "epsilon",
    "epsilon_reports",
    "group_standing",
    "privacy_costs",
    "tuning_reports",
]
