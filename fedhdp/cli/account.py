"""`fedhdp account`: what rounds cost, the noise that an epsilon needs, what an experiment or an app costs each group."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedhdp.cli._output import console, in_short, on_delta, print_json, print_table, table
from fedhdp.privacy.accounting import pluralize

if TYPE_CHECKING:
    from fedhdp.experiments.config import Experiment
    from fedhdp.privacy.accounting import PrivacyCost

WIDEST = 40  # of the curve's bars, in characters


def account(
    experiment: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME, FILE.toml or APP]",
            help="Price an experiment, group by group, or the folder of a Flower app, level by level.",
        ),
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise as a multiple of what one neighbour can change.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="In place of the noise: find the noise for this epsilon.")
    ] = None,
    sampling_rate: Annotated[float | None, typer.Option(help="The chance that a client comes to a round.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds.")] = None,
    delta: Annotated[float | None, typer.Option(help="The delta of the promise; default 1e-4.")] = None,
    accountant: Annotated[str | None, typer.Option(metavar="rdp|pld", help="Default rdp.")] = None,
    sampling: Annotated[str | None, typer.Option(metavar="poisson|fixed", help="Default poisson.")] = None,
    tuning_trials: Annotated[
        float | None, typer.Option(help="Mean number of private runs of which only the best is shown.")
    ] = None,
    tuning_shape: Annotated[
        float, typer.Option(help="How that number is drawn: inf Poisson, 1 geometric, 0 logarithmic.")
    ] = math.inf,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Price a mechanism: the epsilon of some noise, the noise for an epsilon, an experiment's groups, an app's levels.

    Examples:

    `fedhdp account --noise-multiplier 1.5 --sampling-rate 0.05 --rounds 500 --delta 1e-4`

    `fedhdp account --epsilon 3.6 --sampling-rate 0.05 --rounds 500 --accountant pld`

    `fedhdp account three-levels --json`

    `fedhdp account examples/flower_app --rounds 50`
    """
    from fedhdp.results.store import EXPERIMENT

    if tuning_trials is None and tuning_shape != math.inf:
        raise ValueError(f"--tuning-shape needs --tuning-trials, got {tuning_shape:g} and none")
    tuning = None if tuning_trials is None else (tuning_trials, tuning_shape)
    numbers = {
        "--noise-multiplier": noise_multiplier,
        "--epsilon": epsilon,
        "--sampling-rate": sampling_rate,
        "--sampling": sampling,
        "--accountant": accountant,
    }
    if experiment is not None:
        extra = [f"{name} {value}" for name, value in numbers.items() if value is not None]
        if extra:
            raise ValueError(f"{experiment} says its own noise, sampling and groups: it takes no {extra[0]}")
        if (Path(experiment) / EXPERIMENT).is_file():  # the folder of a run
            experiment = str(Path(experiment) / EXPERIMENT)
        if Path(experiment).is_dir() or Path(experiment).name == "pyproject.toml":
            if tuning is not None:
                raise ValueError(f"--tuning-trials is for experiments: {experiment} is a Flower app, run once")
            levels = _levels(experiment, rounds, delta)
            print_json(levels) if json else _print_levels(levels)
            return
        answer = _priced(_found(experiment, rounds, delta), tuning)
        print_json(answer) if json else _print_table(answer)
        return
    if (noise_multiplier is None) == (epsilon is None):
        given = "neither" if epsilon is None else f"--noise-multiplier {noise_multiplier:g} and --epsilon {epsilon:g}"
        raise ValueError(f"give either --noise-multiplier or --epsilon, or an experiment, got {given}")
    for name, value in (("--sampling-rate", sampling_rate), ("--rounds", rounds)):
        if value is None:
            raise ValueError(f"{name} must be given where there is no experiment, got none")
    asked = (sampling_rate, rounds, 1e-4 if delta is None else delta, accountant or "rdp", sampling or "poisson")
    answer = _answer(noise_multiplier, epsilon, *asked, tuning)  # type: ignore[arg-type]
    print_json(answer) if json else _print_answer(answer)


def _answer(
    noise: float | None,
    target: float | None,
    rate: float,
    rounds: int,
    delta: float,
    accountant: str,
    sampling: str,
    tuning: tuple[float, float] | None,
) -> dict[str, Any]:
    """An epsilon, or the noise for one, with all that it rests on; infinity stands for an opted-out client's epsilon."""
    from fedhdp.errors import require
    from fedhdp.mechanism import SENSITIVITY
    from fedhdp.privacy import accounting
    from fedhdp.privacy.accounting import compose, epsilon_best_of, gaussian_cost
    from fedhdp.privacy.calibration import min_noise_multiplier, noise_multiplier_for
    from fedhdp.privacy.tuning import format_trials

    if tuning is not None:
        require(accountant == "rdp", "accountant", accountant, "'rdp' where tuning is priced")

    def cost(spent: PrivacyCost) -> float:
        return epsilon_best_of(spent, *tuning, delta) if tuning else compose([spent], delta, accountant)  # type: ignore[arg-type]

    if noise is None:
        assert target is not None
        noise = noise_multiplier_for(target, rate, rounds, delta, accountant, sampling)
        if tuning and noise > 0:
            noise = min_noise_multiplier(lambda z: cost(gaussian_cost(z, rate, rounds, sampling)), target)
    require(noise < math.inf, "noise_multiplier", noise, "finite")
    spent = gaussian_cost(noise, rate, rounds, sampling)
    found = cost(spent)
    evenly = sorted({round(rounds * point / 10) for point in range(1, 11)})
    return {
        **({} if target is None else {"noise_multiplier": noise, "epsilon_asked": target}),
        "epsilon": found,
        "opted_out": found == math.inf,
        "delta": delta,
        "noise_multiplier": noise,
        "sampling_rate": rate,
        "rounds": rounds,
        "sampling": sampling,
        "adjacency": accounting.ADJACENCY[sampling],
        "accountant": accountant,
        "tuning": None if tuning is None else format_trials(*tuning),
        "noise_in_clips": noise * SENSITIVITY[sampling],
        "epsilon_were_the_noise_in_clips": cost(spent._replace(noise_multiplier=noise / SENSITIVITY[sampling])),
        "curve": [{"rounds": done, "epsilon": cost(spent._replace(rounds=done))} for done in evenly],
    }


def _given(rounds: int | None, delta: float | None) -> dict[str, Any]:
    return {field: value for field, value in (("rounds", rounds), ("delta", delta)) if value is not None}


def _found(name: str, rounds: int | None, delta: float | None) -> Experiment:
    import msgspec

    from fedhdp.experiments import EXPERIMENTS
    from fedhdp.experiments.config import find

    return msgspec.structs.replace(find(name, EXPERIMENTS), **_given(rounds, delta))


def _levels(app: str, rounds: int | None, delta: float | None) -> dict[str, Any]:
    """Each level of a deployment: what it is promised, and what that costs a client of it over all rounds."""
    from fedhdp.flower.config import Deployment
    from fedhdp.privacy.accounting import ADJACENCY, gaussian_epsilon

    offered = Deployment.from_app(Path(app), **_given(rounds, delta))
    mechanism = offered.mechanism(dict.fromkeys(offered.levels, 1))
    promised, sampling = {group.name: group for group in mechanism.groups}, mechanism.sampling
    levels = []
    for name in offered.levels_by_strictness:
        asked = (promised[name].noise_multiplier, promised[name].sampling_rate, offered.rounds, offered.delta_of(name))
        budget = offered.budgets.get(name)
        levels.append(
            {
                "level": name,
                "opted_out": promised[name].opted_out,
                "epsilon": gaussian_epsilon(*asked, "rdp", sampling),
                "epsilon_pld": gaussian_epsilon(*asked, "pld", sampling),
                "delta": asked[3],
                "noise_multiplier": asked[0],
                "sampling_rate": asked[1],
                "weight": promised[name].weight,
                "budget": budget and budget.epsilon,
            }
        )
    basis = {"rounds": offered.rounds, "sampling": sampling, "adjacency": ADJACENCY[sampling]}
    return {"deployment": offered.name, **basis, "repeatable": offered.repeatable, "levels": levels}


def _priced(experiment: Experiment, tuning: tuple[float, float] | None) -> dict[str, Any]:
    """Each group's epsilon by both accountants, once for all the variants that cost the same."""
    from fedhdp.privacy.accounting import epsilon_reports, privacy_costs
    from fedhdp.privacy.tuning import format_trials, tuning_reports

    rounds, alike = experiment.rounds, {}  # type: ignore[var-annotated]
    chosen = experiment.mechanism.build(rounds, experiment.delta)
    for variant in experiment.variants:
        mechanism = variant.mechanism(chosen)
        alike.setdefault(tuple(privacy_costs(mechanism).items()), []).append((variant.name, mechanism))
    everything = [mechanism for variants in alike.values() for _, mechanism in variants]
    priced = []
    for variants in alike.values():
        groups = []
        for group in variants[0][1].groups:
            mechanism, delta = variants[0][1], experiment.delta_of(group.name)
            rdp = epsilon_reports(mechanism, rounds, delta)[group.name]
            pld = (
                epsilon_reports(mechanism, rounds, delta, "pld")[group.name]
                if mechanism.sampling == "poisson"
                else None
            )
            among = [m for m in everything if not next(one for one in m.groups if one.name == group.name).opted_out]
            tuned = tuning_reports(among or everything, rounds, delta, *tuning)[group.name] if tuning else None
            if tuned is not None and rdp.epsilon == math.inf:  # of this row nothing is promised, whatever is chosen
                tuned = rdp
            groups.append(
                {
                    "group": group.name,
                    "clients": group.clients,
                    "opted_out": rdp.epsilon == math.inf,
                    "epsilon": rdp.epsilon,
                    "epsilon_pld": pld and pld.epsilon,
                    "epsilon_tuned": tuned and tuned.epsilon,
                    "delta": delta,
                    "noise_multiplier": rdp.noise_multiplier,
                    "sampling_rate": rdp.sampling_rate,
                    "rounds": rounds,
                    "sampling": rdp.sampling,
                    "adjacency": rdp.adjacency,
                }
            )
        priced.append({"variants": [name for name, _ in variants], "groups": groups})
    said = {"experiment": experiment.name, "tuning": format_trials(*tuning) if tuning else None}
    return said | {
        "leaves_out": experiment.on_budget_exhausted == "drop_group" and bool(experiment.budgets),
        "mechanisms": priced,
    }


def _cost(rounds: int) -> str:
    return f"{pluralize(rounds)} cost{'s' * (rounds == 1)}"


def _print_answer(answer: dict[str, Any]) -> None:
    from fedhdp.privacy.accounting import SAMPLER

    out, fixed = console(), answer["sampling"] == "fixed"
    changed = "replacing one client" if fixed else "one client"
    asked, cost = "epsilon_asked" in answer, in_short(answer["epsilon"])
    noise = in_short(answer["noise_multiplier"]) if asked else f"{answer['noise_multiplier']:.4g}"
    rests = (
        f"q {answer['sampling_rate']:g}, {SAMPLER[answer['sampling']]}, {answer['adjacency']}, "
        f"{answer['accountant'].upper()} accountant" + (f", {answer['tuning']}" if answer["tuning"] else "")
    )
    if asked:
        out.print(
            f"Noise multiplier {noise}: {noise} times what {changed} can change keeps {pluralize(answer['rounds'])} "
            f"within epsilon {in_short(answer['epsilon_asked'])} at delta {answer['delta']:g}. "
            f"It costs {cost} ({rests})."
        )
    else:
        out.print(
            f"Epsilon {cost} at delta {answer['delta']:g} is what {_cost(answer['rounds'])} a client "
            f"when the noise is {noise} times what {changed} can change ({rests})."
        )
    if answer["opted_out"]:
        out.print("Without noise nothing is promised: that is opting out.")
        return
    if fixed:
        out.print(
            f"Replacing one client changes a sum by two clips, so this noise is {answer['noise_in_clips']:.4g} clips. "
            f"A mechanism whose noise is {noise} clips has half the multiplier here and pays epsilon "
            f"{in_short(answer['epsilon_were_the_noise_in_clips'])}."
        )
    out.print()
    most = max(point["epsilon"] for point in answer["curve"]) or 1.0
    digits = max(len("rounds"), len(str(answer["rounds"])))
    out.print(f"{'rounds':>{digits}}  epsilon", style="dim")
    for point in answer["curve"]:
        bar = "█" * max(1, round(WIDEST * point["epsilon"] / most)) if point["epsilon"] else ""
        out.print(f"{point['rounds']:>{digits}}  {in_short(point['epsilon']):>7}  ", end="")
        out.print(bar, style="cyan")


def _print_table(answer: dict[str, Any]) -> None:
    from fedhdp.privacy.accounting import SAMPLER

    out, tuned = console(), answer["tuning"] is not None
    first = answer["mechanisms"][0]["groups"][0]
    rests = f"{SAMPLER[first['sampling']]}, {first['adjacency']}"
    out.print(f"{answer['experiment']}: what {_cost(first['rounds'])} each group ({rests})")
    numbers = ("clients", "q", "z", "delta", "ε RDP", "ε PLD", *(["ε tuned"] if tuned else []))
    shown = table(("variant", "group"), numbers)
    for mechanism in answer["mechanisms"]:
        for number, group in enumerate(mechanism["groups"]):
            shown.add_row(
                "" if number else ", ".join(mechanism["variants"]),
                group["group"],
                f"{group['clients']:,}",
                f"{group['sampling_rate']:g}",
                "∞" if group["noise_multiplier"] == math.inf else f"{group['noise_multiplier']:.4g}",
                f"{group['delta']:g}",
                in_short(group["epsilon"]),
                in_short(group["epsilon_pld"]),
                *([in_short(group["epsilon_tuned"])] if tuned else []),
                end_section=number == len(mechanism["groups"]) - 1,
            )
    print_table(out, shown)
    groups = answer["mechanisms"][0]["groups"]
    for line in on_delta(max(group["delta"] for group in groups), sum(group["clients"] for group in groups)):
        out.print(line, style="yellow")
    if answer["leaves_out"]:
        out.print(
            "A group whose budget is spent is left out, and the noise that was there for it goes with it: the others then "
            "get what they were promised themselves, and may pay more than this."
        )
    if tuned:
        among = "each a row that promises the group something"
        out.print(f"tuned: {answer['tuning']}, {among}, by RDP, if nothing of the other trials is shown")


def _print_levels(answer: dict[str, Any]) -> None:
    from fedhdp.privacy.accounting import SAMPLER

    out = console()
    rests = f"{SAMPLER[answer['sampling']]}, {answer['adjacency']}"
    out.print(f"{answer['deployment']}: what {_cost(answer['rounds'])} a client of each level ({rests})")
    shown = table(("level",), ("q", "z", "weight", "delta", "ε RDP", "ε PLD", "budget"))
    for number, level in enumerate(answer["levels"]):
        shown.add_row(
            level["level"] + ("" if number else " (of who does not say)"),
            f"{level['sampling_rate']:g}",
            f"{level['noise_multiplier']:.4g}",
            f"{level['weight']:g}",
            f"{level['delta']:g}",
            in_short(level["epsilon"]),
            in_short(level["epsilon_pld"]),
            in_short(level["budget"]),
        )
    print_table(out, shown)
    out.print(
        "This is what is promised, whoever comes: others' choices may give a client more noise, not less. A server's ledger "
        "counts by RDP, over all runs; rounds that a crash cut short are charged again."
    )
    if answer["repeatable"]:
        out.print("noise or cohorts come from a given seed: nothing of this is promised", style="yellow")
