"""Metadata of several batches as that of one: a rule that the caller may name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from raycrew.tensor_transport._columns.equality import equal
from raycrew.tensor_transport._columns.naming import refuse_unknown
from raycrew.tensor_transport.errors import BatchSchemaError

MetadataRule: TypeAlias = Literal["same", "first"] | Callable[[list[Any]], Any]
MetadataRules: TypeAlias = MetadataRule | Mapping[str, MetadataRule]


def join_metadata(parts: Sequence[Mapping[str, Any]], rules: MetadataRules = "same") -> dict[str, Any]:
    """For each key, the one value of those batches that have it.

    Args:
        parts: Metadata of each batch.
        rules: `same`: they agree. `first`: the first one's. Or a function of the list of their values. Or one
            of these for each key; keys that are not named are to agree.

    Raises:
        ValueError: A rule is unknown, or for a key that no batch has.
        BatchSchemaError: Values differ that have to agree.
    """
    keys = {key: None for part in parts for key in part}
    if isinstance(rules, Mapping):
        if keys:
            refuse_unknown(rules, keys, "metadata")
        chosen: Mapping[str, MetadataRule] = rules
        default: MetadataRule = "same"
    else:
        chosen, default = {}, rules
    for rule in (default, *chosen.values()):
        if rule not in ("same", "first") and not callable(rule):
            raise ValueError(f"metadata is joined by 'same', 'first' or a function, not by {rule!r}")
    return {
        key: _join_values(key, [part[key] for part in parts if key in part], chosen.get(key, default))
        for key in keys
    }


def _join_values(key: str, values: list[Any], rule: MetadataRule) -> Any:
    if callable(rule):
        return rule(values)
    differ = [value for value in values[1:] if not equal(value, values[0])] if rule == "same" else []
    if differ:
        raise BatchSchemaError(
            f"metadata {key!r} differs between batches: {values[0]!r:.60} and {differ[0]!r:.60}; pass "
            'metadata="first", or metadata={' + repr(key) + ": a function of the list of values}",
            key=key,
            expected=values[0],
            actual=differ[0],
        )
    return values[0]
