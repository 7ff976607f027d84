"""Algorithms that are the same for some mechanisms are the same to the bit."""

from __future__ import annotations

from helpers import mechanism_of
from msgspec.structs import replace
from simulations import CHOSEN, same, trained

from fedhdp.algorithms import dp_fedavg, fedhdp, hdp_fedavg, non_private


def test_fedhdp_with_weight_1_is_hdp_fedavg_to_the_bit(data):
    ones = replace(CHOSEN, groups=tuple(replace(g, weight=1.0) for g in CHOSEN.groups))
    same(trained(data, fedhdp(ones)), trained(data, hdp_fedavg(CHOSEN)))


def test_hdp_fedavg_where_all_chose_the_same_is_dp_fedavg_to_the_bit(data):
    alike = replace(CHOSEN, groups=tuple(replace(g, noise_multiplier=1.5) for g in CHOSEN.groups))
    same(trained(data, hdp_fedavg(alike)), trained(data, dp_fedavg(alike)))


def test_dp_fedavg_where_all_opted_out_is_non_private_to_the_bit(data):
    open_ = replace(CHOSEN, groups=tuple(replace(g, noise_multiplier=0.0) for g in CHOSEN.groups))
    same(trained(data, dp_fedavg(open_)), trained(data, non_private(CHOSEN)))


def test_shared_noise_is_per_group_noise_with_one_private_group_to_the_bit(data):
    chosen = mechanism_of((4, 0.0, 1.0), (15, 1.5, 0.1))
    same(trained(data, chosen), trained(data, replace(chosen, noise="per_group")))
