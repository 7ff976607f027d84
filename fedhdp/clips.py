"""Clips: the norms to which updates are scaled down, fixed or following a quantile of the norms, for all layers or for each.

The server clips by them; what a round costs with them is in ``Mechanism``.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from fedhdp.errors import InvalidValueError, require

MIN_CLIP, MAX_CLIP = 1e-9, 1e9  # so that noise is never too small for single precision, and nothing overflows


class AdaptiveClip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A clip that follows a quantile of the update norms, learnt from noised bits (Andrew et al., 2021).

    Args:
        initial: The clip of the first round.
        quantile: The quantile of the update norms that it follows.
        learning_rate: How fast it follows. 0: it is fixed, and no clip bits are released.
        bit_noise_stddev: Noise on the sum of the clip bits. None: see ``Mechanism.bit_noise_stddev``.

    Raises:
        InvalidValueError: If a field is out of range.
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    bit_noise_stddev: float | None = None

    def __post_init__(self) -> None:
        _require_clip("initial", self.initial)
        _require_clip_rule(self)


class LayerClip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A clip for each layer of the model: fixed, or following a quantile of the norms of that layer's updates.

    A layer is named by the path of a parameter, such as ``first/w``, or by the beginning of the paths of several, such as
    ``first``. Every parameter belongs to exactly one layer.

    Args:
        layers: The clip of the first round, by layer.
        quantile: The quantile of the norms that each clip follows.
        learning_rate: How fast the clips follow it. 0: they are fixed, and no clip bits are released.
        bit_noise_stddev: Noise on the sum of each layer's clip bits. None: see ``Mechanism.bit_noise_stddev``.

    Raises:
        InvalidValueError: If a field is out of range.
    """

    layers: dict[str, float]
    quantile: float = 0.5
    learning_rate: float = 0.2
    bit_noise_stddev: float | None = None

    def __post_init__(self) -> None:
        require(len(self.layers) >= 1, "layers", self.layers, "one layer or more")
        for name, clip in self.layers.items():
            require(bool(name) and name.isprintable(), "layers", name, "of printable names that are not empty")
            _require_clip(f"layers.{name}", clip)
        ordered = {name: float(self.layers[name]) for name in sorted(self.layers)}  # one text for equal values
        msgspec.structs.force_setattr(self, "layers", ordered)
        _require_clip_rule(self)

    def __hash__(self) -> int:
        return hash((*self.layers.items(), self.quantile, self.learning_rate, self.bit_noise_stddev))


if TYPE_CHECKING:
    Clip: TypeAlias = float | AdaptiveClip | LayerClip
else:
    Clip = Any  # msgspec decodes a union of one struct only: ``parse_clip`` decodes this one


def parse_clip(value: Any) -> Clip:
    """A clip from what a user or a file writes: a number, ``{initial: …}`` or ``{layers: {name: …}}``.

    Raises:
        InvalidValueError: If it is none of these, or a field is unknown or out of range.
    """
    if isinstance(value, AdaptiveClip | LayerClip):
        return value
    if not isinstance(value, dict):
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        require(is_number, "clip", value, "a number, a table with initial, or a table with layers")
        _require_clip("clip", value)
        return float(value)
    require("initial" in value or "layers" in value, "clip", value, "a table with initial or layers")
    kind: type[AdaptiveClip] | type[LayerClip] = LayerClip if "layers" in value else AdaptiveClip
    fields = kind.__struct_fields__
    for name in value:
        require(name in fields, f"clip.{name}", value[name], f"one of {', '.join(fields)}")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if isinstance(cause := error.__cause__, InvalidValueError):
            raise InvalidValueError(f"clip.{cause}", f"clip.{cause.field}", cause.value) from error
        complaint, _, place = str(error).partition(" - at `$")
        field = f"clip{place.rstrip('`')}"
        raise InvalidValueError(f"{field}: {complaint}, in {value}", field, value) from error


def _require_clip(field: str, clip: float) -> None:
    require(MIN_CLIP <= clip <= MAX_CLIP, field, clip, f"between {MIN_CLIP:g} and {MAX_CLIP:g}")


def _require_clip_rule(clip: AdaptiveClip | LayerClip) -> None:
    """Refuse numbers that are out of range in the rule by which a clip moves."""
    require(0 <= clip.quantile <= 1, "quantile", clip.quantile, "between 0 and 1")
    require(0 <= clip.learning_rate < math.inf, "learning_rate", clip.learning_rate, "finite and at least 0")
    in_range = clip.bit_noise_stddev is None or 0 <= clip.bit_noise_stddev < math.inf
    require(in_range, "bit_noise_stddev", clip.bit_noise_stddev, "finite and at least 0")
