"""Simulations whose mechanism is a function of the round."""

from __future__ import annotations

import math

import pytest
from helpers import raises_field
from msgspec.structs import replace
from simulations import CHOSEN, MODEL, TRAINING, same, same_server, trained

from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.mechanism import Mechanism
from fedhdp.privacy.accounting import compose
from fedhdp.privacy.budget import drop_groups
from fedhdp.privacy.costs import composed_costs
from fedhdp.simulation import Simulation, simulate, simulate_many


def ramp(round: int) -> Mechanism:
    """A weight that grows from round to round."""
    first, *others = CHOSEN.groups
    return replace(CHOSEN, groups=(first, *(replace(group, weight=0.1 * (round + 1)) for group in others)))


def test_a_function_of_the_round_is_the_mechanism_of_each_round(data):
    by_hand = trained(data, ramp(0), rounds=0)
    by_hand.run(4, before_round=lambda simulation: simulation.set_mechanisms([ramp(simulation.round)]))
    scheduled = trained(data, ramp, rounds=4)
    same(by_hand, scheduled)
    assert scheduled.mechanism == ramp(3)
    assert not (scheduled.global_model() == trained(data, ramp(0), rounds=4).global_model()).all()


def test_a_function_that_is_constant_is_a_mechanism_to_the_bit(data):
    same(trained(data, lambda round: CHOSEN), trained(data, CHOSEN))


def test_saved_state_resumes_to_the_bit_with_a_schedule(data, tmp_path):
    trained(data, ramp, rounds=2).save(tmp_path / "state.npz")
    resumed = trained(data, ramp, rounds=1)
    resumed.load(tmp_path / "state.npz")
    resumed.run_round()  # by itself, without ``run``
    resumed.run(4)
    same(trained(data, ramp, rounds=4), resumed)


def test_a_result_is_priced_with_the_mechanisms_that_ran(data):
    settings = {"training": TRAINING, "rounds": 4, "seed": 3}
    stopped = simulate(data, MODEL, ramp, on_round=lambda simulation: simulation.round < 3, **settings)
    assert stopped.mechanism == ramp(2)
    costs = composed_costs(map(ramp, range(3)))
    for group in stopped.result("", 1e-4, "rdp").groups[1:]:
        assert (group.rounds, group.epsilon) == (3, compose(costs[group.name], 1e-4, "rdp"))

    def noiseless_third(round: int) -> Mechanism:
        open_ = tuple(replace(group, noise_multiplier=0.0) for group in CHOSEN.groups)
        return replace(CHOSEN, groups=open_) if round == 2 else CHOSEN

    result = simulate(data, MODEL, noiseless_third, **settings).result("")
    assert all(group.epsilon == math.inf and group.unprotected for group in result.groups)


def test_functions_are_trainings_of_their_own(data):
    """Two that agree in the first round may differ later: they never share a global model."""
    one, other = simulate_many(data, MODEL, [lambda round: CHOSEN, CHOSEN], TRAINING, rounds=2, seed=3, noise_seed=7)
    simulation = Simulation(data, MODEL, [ramp, lambda round: ramp(0)], TRAINING, seed=3, noise_seed=7)
    assert simulation.run_of == [0, 1]
    simulation.run(3)
    assert not (simulation.global_model(0) == simulation.global_model(1)).all()
    assert one.mechanism == other.mechanism
    same_server(simulation, _pair(data))


def _pair(data) -> Simulation:
    simulation = Simulation(data, MODEL, [ramp, ramp(0)], TRAINING, seed=3, noise_seed=7)
    simulation.run(3)
    return simulation


def fewer(mechanism: Mechanism) -> Mechanism:
    """The same with one client of the first group in the second."""
    first, second, *others = mechanism.groups
    moved = replace(first, clients=first.clients - 1), replace(second, clients=second.clients + 1)
    return replace(mechanism, groups=(*moved, *others))


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("mechanisms", fewer(CHOSEN)),  # a client would change its level
        ("mechanisms", replace(CHOSEN, groups=tuple(replace(g, name=f"new {g.name}") for g in CHOSEN.groups))),
        ("clip", replace(CHOSEN, clip=AdaptiveClip(0.7))),  # the server has a clip already
        ("mechanism", None),
    ],
)
def test_what_may_not_change_is_refused(data, field, changed):
    with raises_field(field):
        trained(data, lambda round: changed if round == 1 else CHOSEN, rounds=2)


def test_mechanisms_that_are_set_are_those_of_the_next_round(data):
    """A group that is dropped between two rounds is not sampled in the next one."""
    simulation = trained(data, ramp, rounds=2)
    dropped = drop_groups(ramp(2), ["group 2"])
    simulation.set_mechanisms([dropped])
    simulation.run_round()
    assert simulation.mechanism == dropped
    simulation.run_round()
    assert simulation.mechanism == ramp(3)


@pytest.mark.parametrize("clip", [0.3, LayerClip({"first": 0.3, "rest": 0.3})])
def test_layers_stay_those_of_the_compiled_round(data, clip):
    """The noise of a flat clip is too little for updates that are clipped layer by layer."""
    layered, flat = (
        replace(CHOSEN, clip=LayerClip({"first": 0.3, "rest/b": 0.3, "rest/w": 0.3})),
        replace(CHOSEN, clip=clip),
    )
    simulation = Simulation(data, MODEL, layered, TRAINING)
    with raises_field("mechanisms"):
        simulation.set_mechanisms([flat])
    assert simulation.mechanism == layered
