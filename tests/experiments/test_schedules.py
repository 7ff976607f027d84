"""Variants whose weights are schedules, and those with a clip of their own."""

from __future__ import annotations

import json

import pytest
from experiment_helpers import TINY, command, keep_going, tiny
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.clips import LayerClip
from fedhdp.errors import ConfigError
from fedhdp.experiments import Experiment, Interrupted, Progress, Variant, from_toml, resume, run, to_toml
from fedhdp.experiments.schedules import BLOCK, WeightSchedule, weight_at
from fedhdp.mechanism import Mechanism, mechanism_at
from fedhdp.optimizers import ScheduleConfig
from fedhdp.privacy.accounting import compose
from fedhdp.privacy.costs import composed_costs
from fedhdp.privacy.ledger import Ledger
from fedhdp.results import read_arrays

RAMP = {"schedule": "linear_schedule", "init_value": 0.01, "end_value": 0.5, "transition_steps": 8}
LAYERS = "layers = { first = 0.3, rest = 0.2 }\nquantile = 0.6"


def scheduled(**changes: object) -> Experiment:
    """The tiny experiment with weights that grow, two pulls and a constant weight."""
    ramp = Variant("ramp", weights={"private": RAMP})
    strong = Variant("ramp, strong pull", weights={"private": RAMP}, pulls={"private": 0.5})
    return tiny(**({"variants": (ramp, strong, Variant("constant", weights={"private": 0.01}))} | changes))


def text_with(weight: str) -> str:
    """The tiny experiment's file with a weight of its second variant."""
    return TINY.read_text() + f"\n[variants.weights]\nprivate = {weight}\n"


def test_schedules_are_values_of_the_file():
    experiment = scheduled()
    assert from_toml(to_toml(experiment), "written") == experiment
    assert experiment.variants[0].weights["private"] == ScheduleConfig(**RAMP)
    ramp, strong, constant = experiment.variant_mechanisms(experiment.build_mechanism())
    assert isinstance(ramp, WeightSchedule)
    assert [round(ramp(n).groups[1].weight, 4) for n in (0, 4, 8, 11)] == [0.01, 0.255, 0.5, 0.5]
    assert ramp.without_pulls == strong.without_pulls  # they share a global training
    assert hash(ramp) != hash(strong)
    assert isinstance(constant, Mechanism)
    assert constant.groups[1].weight == pytest.approx(ramp(0).groups[1].weight)


def test_weights_of_all_rounds_are_optax_s():
    schedule = ScheduleConfig(**RAMP | {"transition_steps": 3 * BLOCK})
    for number in (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 7):
        assert weight_at(schedule, number, "weights") == pytest.approx(float(schedule.function()(number)), rel=1e-6)


@pytest.mark.parametrize(
    ("weight", "field"),
    [
        ('"much"', "variants[1].weights.private"),
        ("true", "variants[1].weights.private"),
        pytest.param("9" * 400, "variants[1].weights.private", id="more than a double"),
        ("{ value = 1 }", "variants[1].weights.private.schedule"),
        ('{ schedule = "linear" }', "variants[1].weights.private.schedule"),
        ('{ schedule = "linear_schedule", init_value = 1, end_value = 0 }', None),  # an argument is missing
        ('{ schedule = "linear_schedule", init_value = 1, end_value = 0, transition_steps = 5, power = 2 }', None),
        ('{ schedule = "exponential_decay", init_value = 1, transition_steps = 1, decay_rate = 1e9 }', None),
    ],
)
def test_invalid_weights_are_refused(weight, field, tmp_path):
    with pytest.raises(ConfigError) as caught:
        from_toml(text_with(weight), "bad.toml")
    assert "\n" not in str(caught.value)
    assert (caught.value.field or "").startswith(field or "variants[1].weights.private")


def test_invalid_weights_leave_no_run(tmp_path):
    (tmp_path / "bad.toml").write_text(text_with('{ schedule = "linear" }'))
    ended = command("run", tmp_path / "bad.toml", "--out", tmp_path / "run")
    assert (ended.code, len(ended.stderr.strip().splitlines())) == (2, 1) or "weights.private" in ended.stderr
    assert not (tmp_path / "run").exists()


def until(round: int):
    def watch(progress: Progress) -> bool:
        return progress.round < round

    return watch


def test_scheduled_runs_resume_to_the_bit(tmp_path):
    experiment = scheduled(checkpoint_seconds=1e9)
    uninterrupted = run(experiment, tmp_path / "whole", keep_going)
    with pytest.raises(Interrupted):
        run(experiment, tmp_path / "run", until(5))
    resumed = resume(tmp_path / "run", keep_going)
    for first, second in zip(uninterrupted.variants, resumed.variants, strict=True):
        assert replace(first, seconds=0.0) == replace(second, seconds=0.0)
    for name in ("ramp", "ramp-strong-pull", "constant"):
        models = [read_arrays(tmp_path / folder / name / "model.npz") for folder in ("whole", "run")]
        assert all((models[0][key] == models[1][key]).all() for key in models[0])
    ramp, _, constant = experiment.variant_mechanisms(experiment.build_mechanism())
    for variant, mechanism in zip(uninterrupted.variants, (ramp, ramp, constant), strict=True):
        costs = composed_costs(mechanism_at(mechanism, number) for number in range(12))["private"]
        assert variant.groups[1].epsilon == compose(costs, experiment.delta, experiment.run_accountant)
    assert [variant.groups[1].weight for variant in uninterrupted.variants] == [0.5, 0.5, 0.01]


@pytest.mark.slow
def test_scheduled_rounds_are_charged_one_by_one(tmp_path):
    ledger = tmp_path / "population.ledger"
    mild = {
        "noise_multipliers": {"opted out": 0.4},
        "weights": {"opted out": RAMP},
    }  # the other group's noise covers it
    experiment = tiny(ledger=str(ledger), noise_seed=None, variants=(Variant("ramp", **mild),))
    summary = run(experiment, tmp_path / "run", keep_going)
    (mechanism,) = experiment.variant_mechanisms(experiment.build_mechanism())
    expected = composed_costs(mechanism_at(mechanism, number) for number in range(12))
    with Ledger(ledger, read_only=True) as opened:
        for group in summary.variants[0].groups:
            charged = opened.costs(group.name)
            assert sum(cost.rounds for cost in charged) == 12
            assert compose(charged, 1e-4, "rdp") == pytest.approx(compose(expected[group.name], 1e-4, "rdp"), rel=1e-9)
            assert group.epsilon == compose(charged, 1e-4, "rdp")
        assert len(opened.costs("opted out")) > 3


def test_account_prices_schedules(tmp_path):
    path = tmp_path / "ramp.toml"
    path.write_text(to_toml(scheduled(variants=scheduled().variants[:1])))
    (report,) = json.loads(command("account", path, "--json").stdout)["mechanisms"]
    experiment = from_toml(path.read_text(), "ramp.toml")
    (mechanism,) = experiment.variant_mechanisms(experiment.build_mechanism())
    costs = composed_costs(mechanism_at(mechanism, number) for number in range(12))["private"]
    assert report["groups"][1]["epsilon"] == compose(costs, 1e-4, experiment.run_accountant)


def test_clips_of_an_experiment_s_file(tmp_path):
    flat = "\n[[variants]]\nname = 'flat'\nclip = 0.5\n"
    layered = TINY.read_text().replace("initial = 0.5", LAYERS) + flat
    experiment = from_toml(layered, "layers.toml")
    assert experiment.mechanism.clip == LayerClip({"first": 0.3, "rest": 0.2}, quantile=0.6)
    assert from_toml(to_toml(experiment), "written") == experiment
    summary = run(replace(experiment, rounds=2), tmp_path / "run", keep_going)
    clips = [variant.clip for variant in summary.variants]
    assert [sorted(clip) if isinstance(clip, dict) else clip for clip in clips] == [["first", "rest"]] * 2 + [0.5]
    with raises_field("clip.layers"):
        flat, wrong = Variant("flat", clip=0.5), Variant("wrong", clip=LayerClip({"first": 0.3}))
        run(replace(experiment, variants=(flat, wrong)), tmp_path / "refused", keep_going)
    assert not (tmp_path / "refused").exists()
    with raises_field("mechanism.clip.layers.first", ConfigError):
        from_toml(layered.replace("first = 0.3", "first = -0.3"), "bad.toml")
    with raises_field("mechanism.clip.quantil", ConfigError):
        from_toml(layered.replace("quantile = 0.6", "quantil = 0.6"), "bad.toml")


class Crash(Exception):
    """Stands for a loss of power."""


@pytest.mark.slow
def test_replayed_rounds_of_a_schedule_are_priced_with_their_own_mechanisms(tmp_path):
    def crash(progress: Progress) -> bool:
        if progress.round == 9:
            raise Crash
        return True

    mild = Variant("ramp", noise_multipliers={"opted out": 0.4}, weights={"opted out": RAMP})
    experiment = tiny(noise_seed=None, variants=(mild,), evaluate_every=2, checkpoint_seconds=1e9)
    with pytest.raises(Crash):
        run(experiment, tmp_path / "run", crash)  # eight rounds were shown, and no checkpoint was saved
    with pytest.raises(Interrupted):
        resume(tmp_path / "run", until(3))  # the numbers of the replayed rounds are in the checkpoint
    (variant,) = resume(tmp_path / "run", keep_going).variants
    (mechanism,) = experiment.variant_mechanisms(experiment.build_mechanism())
    numbers = [*range(12), *range(8)]
    costs = composed_costs(mechanism_at(mechanism, number) for number in numbers)["opted out"]
    assert len(costs) == 5  # later its own noise is the largest, whatever its weight
    assert variant.groups[0].rounds == len(numbers)
    assert variant.groups[0].epsilon == compose(costs, experiment.delta, experiment.run_accountant)
