"""Metadata of several batches as that of one: a rule that the caller may name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeGuard

from raycrew.tensor_transport._columns.equality import equal
from raycrew.tensor_transport._columns.joining.metrics import REDUCTIONS, Path, named, reduce_values
from raycrew.tensor_transport._columns.naming import refuse_unknown
from raycrew.tensor_transport.errors import BatchSchemaError

MetadataRule: TypeAlias = (
    Literal["same", "first", "list", "concat", "sum", "mean", "min", "max"] | Callable[[list[Any]], Any]
)
MetadataRules: TypeAlias = MetadataRule | Mapping[str, "MetadataRules"]

_NAMES = ("same", "first", "list", *REDUCTIONS)


def join_metadata(
    parts: Sequence[Mapping[str, Any]],
    rules: MetadataRules = "same",
    rows: Sequence[int] | None = None,
    *,
    path: Path = (),
) -> dict[str, Any]:
    """For each key, the one value of those batches that have it.

    Args:
        parts: Metadata of each batch.
        rules: A rule, or one for each key; keys that are not named are to agree.
        rows: How many rows each batch has, by which its values count in a mean; all alike by default.
        path: The keys that lead to these, for errors.

    Raises:
        ValueError: A rule is unknown, or for a key that no batch has.
        BatchSchemaError: Values differ that have to agree, or are not what the rule is for.
    """
    weights = [1] * len(parts) if rows is None else rows
    keys = {key: None for part in parts for key in part}
    chosen: Mapping[str, MetadataRules] = {}
    default: MetadataRules = "same"
    if _is_mapping(rules):
        if keys:
            refuse_unknown(rules, keys, named(path) if path else "metadata")
        chosen = rules
    else:
        default = rules
    for rule in (default, *chosen.values()):
        _check_rule(rule)
    joined: dict[str, Any] = {}
    for key in keys:
        having = [(part[key], weight) for part, weight in zip(parts, weights, strict=True) if key in part]
        values, counts = [value for value, _ in having], [weight for _, weight in having]
        joined[key] = _join_values((*path, key), values, counts, chosen.get(key, default))
    return joined


def rules_for(parts: Sequence[Mapping[str, Any]], rules: MetadataRules) -> MetadataRules:
    """A class's rules without those for keys that no batch has."""
    return {k: r for k, r in rules.items() if any(k in p for p in parts)} if _is_mapping(rules) else rules


def _check_rule(rule: object) -> None:
    if isinstance(rule, Mapping):
        for inner in rule.values():
            _check_rule(inner)
    elif not callable(rule) and rule not in _NAMES:
        names = ", ".join(map(repr, _NAMES))
        raise ValueError(f"metadata is joined by {names}, or a function, not by {rule!r}")


def _is_mapping(rules: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(rules, Mapping)


def _join_values(path: Path, values: list[Any], rows: list[int], rule: Any) -> Any:
    if _is_mapping(rule):
        if wrong := [value for value in values if not isinstance(value, Mapping)]:
            raise BatchSchemaError(
                f"{named(path)} has rules for its keys, and is a {type(wrong[0]).__name__} in a batch",
                key=".".join(map(str, path)),
                expected="a mapping",
                actual=type(wrong[0]).__name__,
            )
        return join_metadata(values, rule, rows, path=path)
    if callable(rule):
        return rule(values)
    if rule == "list":
        return values
    if rule in REDUCTIONS:
        return reduce_values(rule, path, values, rows)
    differ = _others(path, values) if rule == "same" else []
    if differ:
        raise BatchSchemaError(
            f"{named(path)} differs between batches: {values[0]!r:.60} and {differ[0]!r:.60}; pass metadata="
            "'first', or a rule for each key, such as 'mean', 'sum', 'list' or a function of the values",
            key=".".join(map(str, path)),
            expected=values[0],
            actual=differ[0],
        )
    return values[0]


def _others(path: Path, values: list[Any]) -> list[Any]:
    """Those that are not equal to the first."""
    try:
        return [value for value in values[1:] if not equal(value, values[0])]
    except Exception as error:
        raise BatchSchemaError(
            f"{named(path)} can't be compared between batches, as == of a {type(values[0]).__name__} gives "
            f"no truth value: {error}; pass metadata='first', 'list' or a function of the values",
            key=".".join(map(str, path)),
        ) from error
