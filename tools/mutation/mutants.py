"""Single mutants of a module: small changes such as people make by mistake, one at a time.

Place in the data flow: the text of a module -> positions -> changed texts, for mutation.py. cosmic-ray supplies
parsing, positions and most operators. Two things it lacks stand here: a choice (it replaces each arithmetic operator by
eleven others, most of which end in a TypeError and flatter the result), and operators for calls, statements and names,
where code on tensors goes wrong: a forgotten `.abs()`, a forgotten line, the neighbour's column. mutmut has neither,
and insists on running the tests itself, in a layout of its own. Refuses to touch texts (f-strings), annotations,
decorators and imports: no test is meant to see them.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cosmic_ray.plugins
import parso
from cosmic_ray.ast import Visitor
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from parso.python import tree

_SWAPS = (
    *("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
    *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
)
_ARITHMETIC = (
    *("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul"),
    *("BitAnd_BitOr", "BitOr_BitAnd", "LShift_RShift", "RShift_LShift"),
)
_OTHERS = (
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer"),
    *("ZeroIterationForLoop", "ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Not"),
    "ReplaceUnaryOperator_Delete_Invert",
)
COSMIC_RAY = (
    *(f"ReplaceComparisonOperator_{swap}" for swap in _SWAPS),
    *(f"ReplaceBinaryOperator_{swap}" for swap in _ARITHMETIC),
    *_OTHERS,
)
"""The operators of cosmic-ray that are used."""


_SEEN_ON_A_GPU = ("device", "non_blocking")


class _Own(Operator):
    """What the operators below share: a position is the span of the parts that they change."""

    def points(self, node: Any) -> list[Any]:
        """The changeable parts of one node, in order."""
        raise NotImplementedError

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        for point in self.points(node):
            yield point.start_pos, point.end_pos

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class DropMethodCall(_Own):
    """`x.abs()` becomes `x`."""

    def points(self, node: Any) -> list[Any]:
        if node.type not in ("atom_expr", "power") or node.parent.type == "simple_stmt":
            return []
        parts = node.children
        found = []
        for i in range(1, len(parts) - 1):
            is_call = _is_trailer(parts[i], ".") and _is_trailer(parts[i + 1], "(")
            if is_call and not (i == 1 and _is_namespace(parts[0])):
                found.append(parts[i])
        return found

    def mutate(self, node: Any, index: int) -> Any:
        at = node.children.index(self.points(node)[index])
        del node.children[at : at + 2]
        return node


class DropStatement(_Own):
    """A call, an assignment to an attribute or element, a raise, or the return of a branch becomes `pass`."""

    def points(self, node: Any) -> list[Any]:
        return [node.children[0]] if node.type == "simple_stmt" and _does_something(node.children[0]) else []

    def mutate(self, node: Any, index: int) -> Any:
        first = node.get_first_leaf()
        node.children[0] = tree.Keyword("pass", first.start_pos, first.prefix)
        return node


class DropKeyword(_Own):
    """`f(x, eps=e)` becomes `f(x)`; not `device`, which no test on a CPU can miss."""

    def points(self, node: Any) -> list[Any]:
        if node.type == "arglist" or _is_trailer(node, "("):
            named = [c for c in node.children if c.type == "argument" and len(c.children) == 3 and c.children[1] == "="]
            return [argument for argument in named if argument.children[0].value not in _SEEN_ON_A_GPU]
        return []

    def mutate(self, node: Any, index: int) -> Any:
        at = node.children.index(self.points(node)[index])
        first = at - 1 if at and node.children[at - 1] == "," else at
        last = at if first < at or node.children[at + 1 : at + 2] != [","] else at + 1
        del node.children[first : last + 1]
        return node


class ReplaceAttribute(_Own):
    """`x.losses_M` becomes `x.abs_losses_M`: the next, by name, of what the module reads from `x` and ends alike."""

    def points(self, node: Any) -> list[Any]:
        return [node.children[1]] if _attribute_of(node) and self._other(node) else []

    def mutate(self, node: Any, index: int) -> Any:
        node.children[1].children[1] = tree.Name(self._other(node), node.children[1].children[1].start_pos)
        return node

    def _other(self, node: Any) -> str:
        base, name = node.children[0].value, node.children[1].children[1].value
        read = _attributes(node.get_root_node()).get(base, set()) | {name}
        names = sorted(other for other in read if other.split("_")[-1] == name.split("_")[-1])
        other = names[(names.index(name) + 1) % len(names)]
        return other if other != name else ""


def _is_trailer(node: Any, opening: str) -> bool:
    return node.type == "trailer" and node.children[0] == opening


def _is_namespace(node: Any) -> bool:
    """Whether a name stands for a module, a class or the object itself: a call on it is not a step of a chain."""
    if node.type != "name" or node.value in ("self", "cls", "super") or node.value[:1].isupper():
        return True
    imports = node.get_root_node().iter_imports()
    return any(node.value == name.value for statement in imports for name in statement.get_defined_names())


def _does_something(statement: Any) -> bool:
    if statement.type in ("raise_stmt", "atom_expr", "power", "del_stmt"):
        return True
    if statement.type == "return_stmt":  # that of a branch: what follows it goes on
        return statement.parent.parent.type == "suite" and statement.parent.parent.parent.type == "if_stmt"
    if statement.type != "expr_stmt":
        return False
    target, sign = statement.children[:2]
    return sign.type == "operator" and (sign.value != "=" or target.type in ("atom_expr", "power"))


def _attribute_of(node: Any) -> bool:
    """Whether a node is `name.attribute...`, read and not called."""
    if node.type not in ("atom_expr", "power") or node.children[0].type != "name":
        return False
    parts = node.children
    called = len(parts) > 2 and _is_trailer(parts[2], "(")
    written = node.parent.type == "expr_stmt" and node.parent.children[0] is node
    return _is_trailer(parts[1], ".") and not called and not written and not _is_imported(parts[0])


def _is_imported(name: Any) -> bool:
    return name.value != "self" and _is_namespace(name)


def _attributes(root: Any) -> dict[str, set[str]]:
    """Name -> the attributes that the module reads from it."""

    reads = _Reads()
    reads.walk(root)
    return reads.found


class _Reads(Visitor):
    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}

    def visit(self, node: Any) -> Any:
        if _attribute_of(node):
            self.found.setdefault(node.children[0].value, set()).add(node.children[1].children[1].value)
        return node


OWN = (DropMethodCall, DropStatement, DropKeyword, ReplaceAttribute)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the occurrence-th place of an operator (counted as cosmic-ray does), and the line it is on."""

    operator: str
    occurrence: int
    line: int

    def apply(self, source: str) -> str | None:
        """The changed text; None where it is no Python, or the same program."""
        try:
            changed = mutate_code(source, _operator(self.operator), self.occurrence)
            same = changed is None or ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
        except (SyntaxError, AttributeError):  # cosmic-ray 8.7's ExceptionReplacer takes any last part for a name
            return None
        return None if same else changed


def _operator(name: str) -> Operator:
    own = {cls.__name__: cls for cls in OWN}
    return own[name]() if name in own else cosmic_ray.plugins.get_operator(f"core/{name}")()


def find_mutants(source: str) -> list[Mutant]:
    """Every mutant of a module, by line."""
    root = parso.parse(source)
    found: list[Mutant] = []
    for name in (*COSMIC_RAY, *(cls.__name__ for cls in OWN)):
        places = _Places(_operator(name))
        places.walk(root)
        found += [Mutant(name, occurrence, line) for occurrence, line in places.found]
    return sorted(found, key=lambda mutant: (mutant.line, mutant.operator, mutant.occurrence))


class _Places(Visitor):
    """Where an operator applies, without what no test is meant to see."""

    def __init__(self, operator: Operator) -> None:
        self._operator, self._count = operator, 0
        self.found: list[tuple[int, int]] = []

    def visit(self, node: Any) -> Any:
        for start, _ in self._operator.mutation_positions(node):
            if not _is_outside(node):
                self.found.append((self._count, start[0]))
            self._count += 1
        return node


def _is_outside(node: Any) -> bool:
    if node.parent is not None and node.parent.type == "parameters":  # the `*` between them is no multiplication
        return True
    while node.parent is not None:
        child, node = node, node.parent
        if node.type in ("fstring", "decorator", "import_name", "import_from"):
            return True
        annotation = {"annassign": 1, "tfpdef": 2}.get(node.type)
        if annotation is not None and node.children[annotation] is child:
            return True
        if node.type in ("funcdef", "lambdef") and getattr(node, "annotation", None) is child:
            return True
    return False


def changed_lines(source: str, changed: str) -> tuple[str, str]:
    """The lines that a mutant takes away and those it puts there, white space aside."""
    removed, added = [], []
    for line in difflib.ndiff(_code_lines(source), _code_lines(changed)):
        if line.startswith("- "):
            removed.append(line[2:])
        elif line.startswith("+ "):
            added.append(line[2:])
    return " ".join(removed), " ".join(added)


def _code_lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]
