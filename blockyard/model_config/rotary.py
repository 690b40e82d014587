"""Reads rotary embeddings: `rope_scaling`, `rope_parameters`, `rope_theta` and the fields beside them.

Follows transformers 5: if there is `rope_scaling`, `rope_parameters` is ignored as a whole; values missing in the used
object are taken from top-level fields. `worker_service.models.rotary` computes the angles.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from blockyard.model_config.fields import Fields, is_number

if TYPE_CHECKING:
    from collections.abc import Mapping


DEFAULT_THETA = 10000.0
# Some models state a huge length; messages carry lengths in 32 bits.
MAX_MODEL_LEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    kind: str = "default"
    theta: float = DEFAULT_THETA
    parameters: dict[str, float] = field(default_factory=dict[str, float])
    """The rest of `rope_parameters`, numbers only."""
    share: float = 1.0
    """The share of a head's features that is rotated; they are the first ones."""
    short_factors: tuple[float, ...] = ()
    """For "longrope": divisors of the frequencies if no sequence exceeds the original length."""
    long_factors: tuple[float, ...] = ()
    """For "longrope": divisors of the frequencies if sequences may be longer."""
    query_growth: float = 0.0
    """Queries at position p are scaled by `1 + query_growth * log(1 + p // original length)`; 0: not scaled."""

    @property
    def original_length(self) -> float:
        """The sequence length that the model was pretrained with."""
        return self.parameters[_LENGTH]

    def rotated(self, head_dim: int) -> int:
        """Returns how many features of a head are rotated."""
        return int(head_dim * self.share)

    def num_angles(self, head_dim: int) -> int:
        """Returns how many cosines and sines a position has; scaled queries have their own."""
        return (4 if self.query_growth else 2) * self.rotated(head_dim)

    def for_length(self, max_length: int) -> RotaryConfig:
        """Returns the config with the factors for a maximum length, so that keys depend on no sequence's length."""
        if not self.long_factors:
            return self
        chosen = self.long_factors if max_length > self.original_length else self.short_factors
        return replace(self, long_factors=chosen, short_factors=chosen)


@dataclass(frozen=True, slots=True)
class RotaryKind:
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


_LENGTH = "original_max_position_embeddings"
_WHOLE = "max_position_embeddings"
_TRUNCATE = "truncate"
_POSITIVE = frozenset({"factor", "low_freq_factor", "high_freq_factor", "alpha", _LENGTH})
ROTARY_KINDS = {
    "default": RotaryKind(),
    "linear": RotaryKind(frozenset({"factor"})),
    "llama3": RotaryKind(frozenset({"factor", "low_freq_factor", "high_freq_factor"})),
    "yarn": RotaryKind(
        frozenset({"factor"}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
    "longrope": RotaryKind(optional=frozenset({"factor", "attention_factor"})),
    "ntk_alpha": RotaryKind(
        frozenset({"alpha"}), frozenset({"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
    ),
}
# The kinds that every family supports, by their names in config.json.
COMMON_KINDS = {name: name for name in ("default", "linear", "llama3", "yarn", "longrope")}
_FACTORS = ("short_factor", "long_factor")
_GROWTH = "llama_4_scaling_beta"
# Fields that every kind may have. "finetuned" and the mrope fields do not matter for text prompts.
_GENERAL = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", _LENGTH, "finetuned"}
    | {"mrope_section", "mrope_interleaved"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties of rotary embeddings that the architecture fixes and config.json does not state."""

    share: float | None = None
    """The default of `partial_rotary_factor`; None: the network always rotates whole heads."""
    default_theta: float = DEFAULT_THETA
    """The default of `rope_theta`."""
    kinds: Mapping[str, str] = field(default_factory=COMMON_KINDS.copy)
    """The supported kinds, by their names in config.json."""
    original_length: int | None = None
    """The original length if config.json has no top-level one; None: the object's own, else the full length."""
    grows_queries: bool = False
    """Whether queries are scaled by position, as `llama_4_scaling_beta` says."""


def read_rotary(fields: Fields, **traits: Any) -> tuple[RotaryConfig, int]:
    """Reads the rotary embeddings and the maximum length; records violations in `fields`.

    `traits`: fields of `Traits`.
    """
    max_len = min(fields.integer("max_position_embeddings", most=None), MAX_MODEL_LEN)
    where, given = _choose(fields)
    return _read_object(fields, where, given, max_len, Traits(**traits))


def read_rotaries(
    fields: Fields, global_theta: float, local_theta: float, local_field: str = ""
) -> tuple[tuple[RotaryConfig, RotaryConfig], int]:
    """Reads the rotary embeddings of full_attention and of sliding_attention layers, and the maximum length.

    Args:
        fields: of config.json.
        global_theta: the default theta of full_attention layers.
        local_theta: the default theta of sliding_attention layers.
        local_field: the field with the sliding layers' theta in older files; empty: `rope_theta`.
    """
    max_len = min(fields.integer("max_position_embeddings", most=None), MAX_MODEL_LEN)
    scaling, both = (_object(fields, name) for name in ("rope_scaling", "rope_parameters"))
    if others := sorted(both.keys() - {"full_attention", "sliding_attention"}):
        fields.refuse("rope_parameters", f"config.json: rope_parameters of this architecture have no {others[0]}")
    wide, local = ({"rope_type": "default", **(both.get(f"{kind}_attention") or {})} for kind in ("full", "sliding"))
    wide |= scaling
    beside = fields.number("rope_theta", global_theta, above=1.0)
    own = fields.number(local_field, local_theta, above=1.0) if local_field else local_theta
    wide.setdefault("rope_theta", beside)
    local.setdefault("rope_theta", own if local_field or not fields.has("rope_theta") else beside)
    first, first_len = _read_object(fields, "rope_parameters", wide, max_len, Traits(default_theta=global_theta))
    second, _ = _read_object(fields, "rope_parameters", local, max_len, Traits(default_theta=local_theta))
    return (first, second), first_len


def _object(fields: Fields, name: str) -> dict[str, Any]:
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        fields.refuse(name, f"config.json: {name} must be an object, not {value!r}")
        return {}
    return value or {}


def _read_object(
    fields: Fields, where: str, given: dict[str, Any], max_len: int, traits: Traits
) -> tuple[RotaryConfig, int]:
    name = given.get("rope_type", given.get("type", "default"))
    kind = traits.kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        supported = ", ".join(traits.kinds)
        fields.refuse(where, f"config.json asks for rotary embeddings of type {name!r} (supported: {supported})")
        return RotaryConfig(), max_len
    share = _read_share(fields, given, traits.share)
    theta = _number(fields, where, given, "rope_theta", above=1.0)
    if theta is None:
        theta = fields.number("rope_theta", traits.default_theta, above=1.0)
    growth = _read_growth(fields, where, given) if traits.grows_queries else 0.0
    short, long = (_read_factors(fields, where, given, name) if kind == "longrope" else () for name in _FACTORS)
    known = {*(_FACTORS if kind == "longrope" else ()), *((_GROWTH, _WHOLE) if traits.grows_queries else ())}
    rest = {name: value for name, value in given.items() if name not in known}
    parameters = _parameters(fields, where, rest, kind, max_len, traits.original_length)
    if kind in ("linear", "yarn") and "factor" in parameters:
        # Some models state the extended length in config.json, and some the original one.
        max_len = max(max_len, int(parameters[_LENGTH] * parameters["factor"]))
    if kind == "longrope":
        parameters.setdefault("factor", max_len / parameters[_LENGTH])
        if parameters[_LENGTH] <= 1:
            fields.refuse(where, f"config.json: rotary embeddings of type {kind!r} need {_LENGTH}, a length above 1")
    return RotaryConfig(kind, theta, parameters, share, short, long, growth), min(max_len, MAX_MODEL_LEN)


def _read_growth(fields: Fields, where: str, given: dict[str, Any]) -> float:
    if given.get(_GROWTH) is None or given.get(_LENGTH) is None:
        fields.refuse(where, f"config.json: {where} need {_GROWTH} and {_LENGTH} in a model of this architecture")
    return _number(fields, where, given, _GROWTH) or 0.0


def _read_factors(fields: Fields, where: str, given: dict[str, Any], name: str) -> tuple[float, ...]:
    value = given.get(name)
    numbers = cast("list[Any]", value) if isinstance(value, list) else []
    factors = tuple(float(number) for number in numbers if is_number(number) and number > 0)
    if not factors or len(factors) != len(numbers):
        fields.refuse(f"{where}.{name}", f"config.json: {name} in {where} must be a list of numbers above 0")
    return factors


def _choose(fields: Fields) -> tuple[str, dict[str, Any]]:
    """Returns the name and the value of the object to use, rope_scaling or rope_parameters."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.get(name)
        if value is not None and not isinstance(value, dict):
            fields.refuse(name, f"config.json: {name} must be an object, not {value!r}")
        elif value:
            found[name] = value
    if not found:
        return "rope_parameters", {}
    name, given = next(iter(found.items()))
    if any(isinstance(value, dict) for value in given.values()):
        fields.refuse(name, "config.json has rotary embeddings that differ between layers, which is not supported")
        return name, {}
    if len(found) > 1:
        lost = found["rope_parameters"].get("rope_theta")
        remark = "config.json has both rope_scaling and rope_parameters, of which rope_scaling counts"
        if "rope_theta" not in given and lost not in (None, fields.number("rope_theta", DEFAULT_THETA)):
            remark += f": rope_theta {lost} is in rope_parameters alone, and not used (write it into rope_scaling)"
        fields.remarks.append(remark)
    return name, given


def _read_share(fields: Fields, given: dict[str, Any], default: float | None) -> float:
    beside = fields.get("partial_rotary_factor")
    share = given.get("partial_rotary_factor", beside)
    if share is None:
        return 1.0 if default is None else default
    if not is_number(share) or not 0 < share <= 1 or (default is None and share != 1):
        why = "which are not supported" if default is None else f"of a share of {share!r}, not above 0 and at most 1"
        fields.refuse("partial_rotary_factor", f"config.json asks for partial rotary embeddings, {why}")
        return 1.0
    return float(share)


def _number(fields: Fields, where: str, given: dict[str, Any], name: str, above: float | None = None) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if not is_number(value) or (above is not None and value <= above):
        wanted = "a number" if above is None else f"a number above {above:g}"
        fields.refuse(f"{where}.{name}", f"config.json: {name} in {where} must be {wanted}, not {value!r}")
        return None
    return float(value)


def _parameters(
    fields: Fields, where: str, given: dict[str, Any], kind: str, max_len: int, length: int | None
) -> dict[str, float]:
    rules = ROTARY_KINDS[kind]
    for name in sorted(given.keys() - _GENERAL - rules.required - rules.optional):
        if given[name] is not None:
            problem = f"config.json: rotary embeddings of type {kind!r} have no {name}: take it out of {where}"
            fields.refuse(f"{where}.{name}", problem)
    parameters: dict[str, float] = {}
    for name in sorted((rules.required | rules.optional | {_LENGTH}) - {_TRUNCATE}):
        value = _number(fields, where, given, name, above=0.0 if name in _POSITIVE else None)
        if value is not None:
            parameters[name] = value
    # As in transformers: the top-level field takes precedence over the one inside the object.
    inside = parameters.get(_LENGTH, float(max_len)) if length is None else float(length)
    parameters[_LENGTH] = fields.number(_LENGTH, inside, above=0.0)
    if kind == "yarn":
        _complete_yarn(fields, where, given, parameters, max_len)
    for name in sorted(rules.required - parameters.keys()):
        if given.get(name) is None:
            fields.refuse(f"{where}.{name}", f"config.json: rotary embeddings of type {kind!r} need {name}")
    if kind == "llama3" and parameters.get("high_freq_factor", 2) <= parameters.get("low_freq_factor", 1):
        fields.refuse(where, "config.json: high_freq_factor must be greater than low_freq_factor")
    return parameters


def _complete_yarn(
    fields: Fields, where: str, given: dict[str, Any], parameters: dict[str, float], max_len: int
) -> None:
    if "factor" in given and given["factor"] is None:
        parameters["factor"] = max_len / parameters[_LENGTH]
    if _TRUNCATE in given:
        # `truncate` is the only parameter that is not a number. Null means false, as in transformers.
        if given[_TRUNCATE] not in (None, True, False):
            problem = f"config.json: truncate in {where} must be true or false, not {given[_TRUNCATE]!r}"
            fields.refuse(f"{where}.truncate", problem)
        parameters[_TRUNCATE] = float(bool(given[_TRUNCATE]))
