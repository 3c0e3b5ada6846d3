"""Small mutations of a source: cosmic-ray's operators, and one for what a function returns."""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator, operator_names

# What says nothing of the tests: `|` joins types here far more often than sets; `is` and `==` are one for
# None and small numbers.
SKIPPED_OPERATORS = re.compile("BitOr|ExceptionReplacer|RemoveDecorator|_Is$|_IsNot$|_Is_Eq|_IsNot_NotEq")
# Nothing is mutated in these: `slots=True`, the size of a cache, what only checks this code itself.
UNTOUCHED = ("decorator", "import_from")
CHECKS = re.compile(r"(strict|repr|compare|covariant)\s*=")


@dataclass(frozen=True)
class Mutation:
    """A changed source, and its changed lines as they were and as they are."""

    source: str
    before: str
    after: str


class ReplaceReturnedValue(Operator):  # type: ignore[misc]
    """`return X` becomes `return None`; of a function that promises a bool, `return not X`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """The value after `return`, unless it is None already."""
        if node.type == "return_stmt" and node.children[1].get_code().strip() != "None":
            value = node.children[1]
            yield value.start_pos, value.end_pos

    def mutate(self, node: Any, index: int) -> Any:  # noqa: ARG002
        """Replace the value."""
        value = node.children[1]
        function = parso.tree.search_ancestor(node, "funcdef")
        promised = function.annotation.get_code().strip() if function and function.annotation else ""
        code = f" not ({value.get_code().strip()})" if promised == "bool" else " None"
        node.children[1] = parso.parse(code)
        return node

    @classmethod
    def examples(cls) -> Sequence[Example]:
        """What it does to two functions."""
        return (
            Example("def f() -> int: return 3", "def f() -> int: return None"),
            Example("def f() -> bool: return x", "def f() -> bool: return not (x)"),
        )


def operators() -> Iterator[Operator]:
    """Those that are used."""
    yield ReplaceReturnedValue()
    for name in operator_names():
        operator = get_operator(name)
        if not operator.arguments() and not SKIPPED_OPERATORS.search(name):
            yield operator()


def places(source: str) -> dict[tuple[int, int], list[tuple[Operator, int]]]:
    """Each place that can be mutated, and the ways: an operator and its occurrence."""
    tree = get_ast(source)
    nodes = list(ast_nodes(tree))
    found: dict[tuple[int, int], list[tuple[Operator, int]]] = {}
    for operator in operators():
        occurrences = ((node, start) for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (node, start) in enumerate(occurrences):
            if not untouched(node):
                found.setdefault(start, []).append((operator, occurrence))
    return found


def untouched(node: Any) -> bool:
    """Whether a node says how a function may be called, or is part of what is never mutated."""
    if node.type == "operator" and node.parent.type in ("parameters", "lambdef"):
        return True
    argument = parso.tree.search_ancestor(node, "argument")
    if argument is not None and CHECKS.match(argument.get_code().strip()):
        return True
    return any(parso.tree.search_ancestor(node, kind) is not None for kind in UNTOUCHED)


def mutations(source: str, count: int, seed: int) -> list[Mutation]:
    """One mutation in each of `count` places, the same for a seed; fewer where there are fewer places."""
    chance = random.Random(seed)
    found = places(source)
    order = sorted(found)
    chance.shuffle(order)
    tried = (_first_that_compiles(source, chance.sample(found[place], len(found[place]))) for place in order)
    chosen: list[Mutation] = []
    for mutation in tried:
        if len(chosen) == count:
            break
        if mutation is not None and mutation not in chosen:
            chosen.append(mutation)
    return chosen


def _first_that_compiles(source: str, ways: Iterable[tuple[Operator, int]]) -> Mutation | None:
    for operator, occurrence in ways:
        changed = mutate_code(source, operator, occurrence)
        try:
            compile(changed, "mutant", "exec")
        except SyntaxError:
            continue
        before, after = (" ".join(line.strip() for line in lines) for lines in changed_lines(source, changed))
        return Mutation(changed, before, after)
    return None


def changed_lines(before: str, after: str) -> tuple[list[str], list[str]]:
    """The lines in which two sources differ: a mutation is in one place."""
    old, new = before.splitlines(), after.splitlines()
    same = 0
    while old and new and old[-1] == new[-1]:
        old.pop(), new.pop()
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    return old[same:], new[same:]
