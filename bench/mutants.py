"""Mutants of a file, and what they change: the part of `mutation.py` that runs no test."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType

from attrs import frozen
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

Key = tuple[str, int]  # a function: its qualified name and its first line


@frozen
class Mutant:
    """A change of a file: the *occurrence*-th that *operator* finds."""

    file: str
    operator: str
    occurrence: int

    def text(self, original: str) -> str:
        """The file after the change."""
        return mutate_code(original, get_operator(self.operator)(), self.occurrence) or original

    def diff(self, original: str) -> str:
        """The change with one line of context."""
        name, lines = f"{self.operator} {self.occurrence}", original.splitlines()
        return "\n".join(
            difflib.unified_diff(lines, self.text(original).splitlines(), self.file, name, n=1, lineterm="")
        )


@frozen
class Module:
    """A file as it is, and what it does: at import, and in each function by name and line."""

    path: Path
    text: str
    at_import: object
    functions: dict[Key, CodeType]

    @classmethod
    def of(cls, path: Path, text: str) -> Module:
        """The module that *text* makes at *path*."""
        functions: dict[Key, CodeType] = {}
        code = compile(running(ast.parse(text)), str(path), "exec", dont_inherit=True)
        return cls(path, text, import_effect(code, functions), functions)

    def differs(self, other: Module) -> bool:
        """Whether *other* does anything else at import."""
        return self.at_import != other.at_import or self.functions.keys() != other.functions.keys()

    def changed(self, other: Module) -> set[Key]:
        """Functions that do something else in *other*."""
        common = self.functions.keys() & other.functions.keys()
        return {key for key in common if effect(self.functions[key]) != effect(other.functions[key])}


def running(tree: ast.Module) -> ast.Module:
    """*tree* without annotations and docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.copy_location(ast.Name("object", ast.Load()), node.annotation)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.copy_location(ast.Expr(ast.copy_location(ast.Constant(""), node.body[0])), node.body[0])
    return tree


def import_effect(code: CodeType, functions: dict[Key, CodeType]) -> object:
    """What the body of a module or a class does; the functions it makes go into *functions*."""
    parts: list[object] = [code.co_code, code.co_names]
    for const in code.co_consts:
        if not isinstance(const, CodeType):
            parts.append(repr(const))
        elif const.co_flags & inspect.CO_OPTIMIZED:
            functions[const.co_qualname, const.co_firstlineno] = const
            parts.append(const.co_qualname)
        else:
            parts.append(import_effect(const, functions))
    return parts


def effect(code: CodeType) -> object:
    """All of a function that decides what it does, with those inside it."""
    consts = [effect(const) if isinstance(const, CodeType) else repr(const) for const in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, consts


def mutants(text: str, file: str) -> Iterator[Mutant]:
    """Every change of *file*."""
    nodes = list(ast_nodes(get_ast(text)))
    for name in sorted(operator_names()):
        if get_operator(name).arguments():  # it would have to be told what to look for
            continue
        operator = get_operator(name)()
        count = sum(len(list(operator.mutation_positions(node))) for node in nodes)
        yield from (Mutant(file, name, occurrence) for occurrence in range(count))


def statement_lines(text: str, changed: Iterable[int]) -> set[int]:
    """The lines of the statements that *changed* lines are of; of a compound statement those of its head."""
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    lines = set(changed)
    for line in tuple(lines):
        around = [node for node in statements if node.lineno <= line <= (node.end_lineno or node.lineno)]
        if around:
            node = max(around, key=lambda node: node.lineno)
            body = getattr(node, "body", None)
            lines |= set(range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1))
    return lines


def changed_lines(text: str, other: str) -> set[int]:
    """Numbers of the lines that differ; a mutant has as many as the original."""
    pairs = zip(text.splitlines(), other.splitlines(), strict=False)
    return {number for number, (line, changed) in enumerate(pairs, 1) if line != changed}
