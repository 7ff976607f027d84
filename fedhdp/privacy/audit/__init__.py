"""Audits: does a system keep the epsilon that it claims? The statistics; no JAX.

``fedhdp.experiments.audit`` audits an experiment with them, ``check_release`` anyone's function.
"""
