"""`raycrew`: what is asked for, what each command finds, and how that is said to people and programs."""

from typing import TYPE_CHECKING

from raycrew.cluster_core._command_line.terminal import (
    Outcome,
    Printable,
    add_address,
    complain,
    parser_class,
    show,
)
from raycrew.cluster_core._ray import lazy

if TYPE_CHECKING:
    from raycrew.cluster_core._command_line.parsing import main

__all__ = ["Outcome", "Printable", "add_address", "complain", "main", "parser_class", "show"]

# Commands of other packages do without those of this one.
__getattr__ = lazy(__name__, {"parsing": ["main"]})
