"""What a promise costs: accounting, calibration, budgets and the ledger; no JAX."""
