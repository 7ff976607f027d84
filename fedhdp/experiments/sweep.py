"""A sweep: the product of lists of values for keys of an experiment.

A key that a variant can change (a group's weight, pull, noise multiplier or epsilon, the noise, the sampling, training,
server) makes variants of one experiment, which run in as few simulations as possible. Any other key, such as the model's,
makes an experiment for each of its values. A variant that the key does not change is kept once: DP-FedAvg has no weights.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fedhdp.errors import ConfigError, FedHDPError
from fedhdp.experiments.config import FIELDS, Experiment
from fedhdp.experiments.errors import config_error
from fedhdp.experiments.variant import Variant
from fedhdp.mechanism import SENSITIVITY
from fedhdp.privacy.calibration import GroupConfig, noise_multiplier_for
from fedhdp.results.store import is_directory_name, slug

MAX_VARIANTS = 1000
FIXED = {
    "name": "the experiment's name is one",
    "about": "it changes no result",
    "sweep": "a sweep has no sweep",
    "seed": "several seeds are an option: --seeds",
    "noise_seed": "several seeds are an option: --seeds",
    "variants": "name one: variants.NAME.weights.GROUP",
}
GROUP_CHANGES = {
    "weight": "weights",
    "pull": "pulls",
    "noise_multiplier": "noise_multipliers",
    "epsilon": "epsilons",
}
EXCLUSIVE = {"noise_multiplier": "epsilon", "epsilon": "noise_multiplier"}  # a group states one of them
Point = dict[str, Any]  # a value for each key


def expand(experiment: Experiment) -> dict[str, Experiment]:
    """The experiments of a sweep, which have none themselves.

    Args:
        experiment: An experiment with a sweep, or without one.

    Returns:
        By directory name; one experiment has the name "".

    Raises:
        ConfigError: If a key does not exist or cannot be swept, a value is out of range, or the product is too large.
    """
    if not experiment.sweep:
        return {"": experiment}
    lists = _lists(experiment)
    base = replace(experiment, sweep={})
    for key, values in lists.items():
        for value in values:
            _changed(base, {key: value})  # so that an error names this value alone
    inner = [key for key in lists if _is_variants(base, key)]
    outer = [key for key in lists if key not in inner]
    experiments: dict[str, Experiment] = {}
    for point in _points(lists, outer):
        changed = _changed(base, point)
        varied = _with_variants(changed, lists, inner) if inner else changed
        name = slug(_text(point, lists)) if point else ""
        if name in experiments or not is_directory_name(name or "run"):
            name = f"sweep-{len(experiments) + 1}"
        experiments[name] = varied
    return experiments


def with_options(experiment: Experiment, options: Mapping[str, Any]) -> Experiment:
    """The experiment with other values of fields, which its sweep must leave alone.

    Raises:
        ConfigError: If a field is swept, or a value is out of range.
    """
    for name, value in options.items():
        if name in experiment.sweep:
            swept = experiment.sweep[name]
            raise ConfigError(f"{name} = {value!r} is given, and the sweep has {name} = {swept!r}", name, value)
    return replace(experiment, **options)


def changes(experiment: Experiment) -> dict[str, Point]:
    """What each of a sweep's experiments changes, by the names of `expand`."""
    if not experiment.sweep:
        return {"": {}}
    lists = _lists(experiment)
    base = replace(experiment, sweep={})
    outer = [key for key in lists if not _is_variants(base, key)]
    return dict(zip(expand(experiment), _points(lists, outer), strict=True))


def resolve_sweep(experiment: Experiment, directory: Path) -> dict[str, Any]:
    """The sweep, with the paths among its values made absolute."""
    base, resolved = replace(experiment, sweep={}), {}
    for key, values in _lists(experiment).items():
        at = [msgspec.to_builtins(_changed(base, {key: value}).resolve(directory)) for value in values]
        resolved[key] = [_value(raw, key) for raw in at]
    return resolved


def _lists(experiment: Experiment) -> dict[str, list[Any]]:
    """The values of each key, checked before anything is built."""
    lists = _flatten(experiment.sweep)
    for key, values in lists.items():
        field = f"sweep.{key}"
        if key in FIXED or (key.endswith(".name") and key.startswith("variants.")):
            raise ConfigError(f"{field} cannot be swept: {FIXED.get(key, 'names are made of values')}", field, values)
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{field} must be a list of values, got {values!r}", field, values)
        if len({repr(value) for value in values}) < len(values):
            raise ConfigError(f"{field} must have different values, got {values!r}", field, values)
    count = math.prod(map(len, lists.values())) * len(experiment.variants)
    if count > MAX_VARIANTS:
        message = f"sweep must have at most {MAX_VARIANTS:,} combinations of values and variants, got {count:,}"
        raise ConfigError(message, "sweep", count)
    return lists


def _flatten(sweep: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    lists: dict[str, Any] = {}
    for name, value in sweep.items():
        key = f"{prefix}.{name}" if prefix else name
        lists |= _flatten(value, key) if isinstance(value, dict) else {key: value}
    return lists


def _points(lists: Mapping[str, list[Any]], keys: Sequence[str]) -> list[Point]:
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(lists[key] for key in keys))]


def _changed(experiment: Experiment, point: Point) -> Experiment:
    """The experiment with other values; a `ConfigError` if a key does not exist, or a value is out of range."""
    raw = msgspec.to_builtins(experiment)
    for key, value in point.items():
        _change(raw, key, value)
    try:
        return msgspec.convert(raw, Experiment)
    except msgspec.ValidationError as error:
        raise config_error(error, raw, Experiment, FIELDS, f"sweep ({', '.join(point)})") from error


def _change(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a value at a dotted key, in which ``*`` is every group or variant."""
    for table, name in _places(raw, key, key):
        table[name] = copy.deepcopy(value)
        if key.startswith("mechanism.groups.") and name in EXCLUSIVE:
            table[EXCLUSIVE[name]] = None


def _value(raw: dict[str, Any], key: str) -> Any:
    table, name = _places(raw, key, key)[0]
    return table[name]


def _places(table: Any, rest: str, key: str) -> list[tuple[dict[str, Any], str]]:
    """The tables and names of a dotted key; a name may have dots itself."""
    if isinstance(table, list | tuple) and all(isinstance(item, dict) and "name" in item for item in table):
        if rest.startswith("*."):
            return [place for item in table for place in _places(item, rest[2:], key)]
        by_name = {item["name"]: item for item in table}
        name = _first(by_name, rest)
        if name not in by_name or name == rest:
            raise ConfigError(
                f"sweep.{key}: {rest!r} must begin with one of {', '.join(by_name)}", f"sweep.{key}", rest
            )
        return _places(by_name[name], rest[len(name) + 1 :], key)
    if not isinstance(table, dict):
        raise ConfigError(f"sweep.{key}: there is no table with {rest!r}", f"sweep.{key}", rest)
    name = _first(table, rest)
    if name == rest:
        return [(table, name)]
    if table.get(name) is None:
        table[name] = {}
    return _places(table[name], rest[len(name) + 1 :], key)


def _first(names: Mapping[str, Any], rest: str) -> str:
    """The name with which a dotted key begins: the longest one that exists, or the part before the first dot."""
    existing = [name for name in names if rest == name or rest.startswith(f"{name}.")]
    return max(existing, key=len, default=rest.partition(".")[0])


def _is_variants(experiment: Experiment, key: str) -> bool:
    """Whether a variant can change the value of a key."""
    table, _, rest = key.partition(".")
    if table in ("training", "server"):
        return rest != ""
    if key in ("mechanism.noise", "mechanism.sampling") or table == "variants":
        return True
    return key.startswith("mechanism.groups.") and key.rpartition(".")[2] in GROUP_CHANGES


def _with_variants(experiment: Experiment, lists: Mapping[str, list[Any]], keys: Sequence[str]) -> Experiment:
    """The experiment with its variants at every point of some keys; each once for the keys that change it."""
    points, variants = _points(lists, keys), []
    for variant in experiment.variants:
        varied = [_vary(experiment, variant, point) for point in points]
        effects = [_effect(experiment, other) for other in varied]
        changing = [key for key in keys if _has_effect(key, points, effects)]
        named: dict[str, Variant] = {}
        for point, other in zip(points, varied, strict=True):
            text = _text({key: point[key] for key in changing}, {key: lists[key] for key in changing})
            named.setdefault(f"{variant.name} {text}".strip(), other)
        for number, (name, other) in enumerate(named.items(), 1):
            short = name if is_directory_name(name) else f"{variant.name[:40]} {number}"
            variants.append(replace(other, name=short))
    try:
        return replace(experiment, variants=tuple(variants))
    except FedHDPError as error:
        raise ConfigError(f"sweep: {error}", f"sweep ({', '.join(keys)})", error.value) from error


def _vary(experiment: Experiment, variant: Variant, point: Point) -> Variant:
    """The variant at a point. What the variant itself changes in the experiment stays as it is."""
    base, raw = msgspec.to_builtins(experiment), msgspec.to_builtins(variant)
    stated = copy.deepcopy(raw)
    for key, value in point.items():
        table, _, rest = key.partition(".")
        if table == "variants":
            name = _first(dict.fromkeys(("*", variant.name)), rest)
            if name in ("*", variant.name):
                _change(raw, rest[len(name) + 1 :], value)
        elif table in ("training", "server"):
            field = rest.partition(".")[0]
            if field not in stated[table]:
                raw[table].setdefault(field, copy.deepcopy(base[table].get(field)))
                _change(raw[table], rest, value)
        elif key in ("mechanism.noise", "mechanism.sampling"):
            raw[rest] = stated[rest] or value
        else:
            group, _, field = key.removeprefix("mechanism.groups.").rpartition(".")
            names = [config.name for config in experiment.mechanism.groups] if group == "*" else [group]
            raw[GROUP_CHANGES[field]] |= {name: value for name in names if name not in stated[GROUP_CHANGES[field]]}
    try:
        return msgspec.convert(raw, Variant)
    except msgspec.ValidationError as error:
        raise config_error(error, raw, Variant, FIELDS, f"sweep ({', '.join(point)})") from error


def _effect(experiment: Experiment, variant: Variant) -> tuple[object, ...]:
    """What a variant runs with; noise is calibrated by RDP, which is fast, since only its order matters."""
    sampling = variant.sampling or experiment.mechanism.sampling

    def with_noise(group: GroupConfig) -> GroupConfig:
        if group.epsilon is None or group.sampling_rate == 0:
            return group
        numbers = (group.epsilon, group.sampling_rate, experiment.rounds, group.delta or experiment.delta)
        noise = noise_multiplier_for(*numbers, "rdp", sampling) * SENSITIVITY[sampling]
        return replace(group, epsilon=None, noise_multiplier=noise)

    config = experiment.mechanism.with_epsilons(variant.epsilons)
    mechanism = replace(config, groups=tuple(map(with_noise, config.groups))).uncalibrated(default_clients=1)
    from fedhdp.theory.pricing import RoughPricing

    return variant.mechanism(mechanism, RoughPricing(experiment.rounds)), *replace(
        experiment, variants=(variant,)
    ).overrides(0)


def _has_effect(key: str, points: Sequence[Point], effects: Sequence[tuple[object, ...]]) -> bool:
    """Whether two points that differ in this key alone differ in effect."""
    by_others: dict[str, tuple[object, ...]] = {}
    for point, effect in zip(points, effects, strict=True):
        others = repr({name: value for name, value in point.items() if name != key})
        if by_others.setdefault(others, effect) != effect:
            return True
    return False


def _text(point: Point, lists: Mapping[str, list[Any]]) -> str:
    """A point as words such as ``weight=0.01``."""
    return " ".join(f"{_short(key, lists)}={_value_text(value, lists[key])}" for key, value in point.items())


def _short(key: str, keys: Mapping[str, Any]) -> str:
    """The shortest end of a key that is no other key's end."""
    parts = key.split(".")
    suffixes = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
    return next((end for end in suffixes if [k for k in keys if k == end or k.endswith(f".{end}")] == [key]), key)


def _value_text(value: Any, values: Sequence[Any]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        short = f"{value:g}"
        return (short if float(short) == value else repr(value)).replace("e+", "e")
    if isinstance(value, str):
        return Path(value).name
    names = [item.get("name") if isinstance(item, dict) else None for item in values]
    name = value.get("name") if isinstance(value, dict) else None
    return str(name) if name is not None and names.count(name) == 1 else f"{values.index(value) + 1}"
