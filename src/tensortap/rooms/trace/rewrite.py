"""Syntax trees of functions with a probe after each binding of a traced name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Node = TypeVar("_Node", bound=ast.AST)
_Block: TypeAlias = (
    "ast.For | ast.AsyncFor | ast.With | ast.AsyncWith | ast.ExceptHandler | ast.match_case"
)

# Probes are globals of the user's module. Names that end in two underscores are not mangled.
ENTER, BIND, BIND_ALWAYS, RESULT, LOCALS = (
    "__tensortap_enter__", "__tensortap_bind__", "__tensortap_bind_always__",
    "__tensortap_result__", "__tensortap_locals__",
)  # fmt: skip
ID, TRACED_IDS = "__tensortap_id__", "__tensortap_ids_{}__"
_CALL = "__tensortap_call__"  # local variable with the call under way


@dataclass(frozen=True)
class ProbeSpec:
    """The events of a function to report: bindings of names, and results."""

    names: frozenset[str] = frozenset()
    results: bool = False

    def __or__(self, other: ProbeSpec) -> ProbeSpec:
        return ProbeSpec(self.names | other.names, self.results or other.results)


def insert_probes(node: Function, spec: ProbeSpec, number: int, anyone: bool) -> Function:
    """Insert probes into a function; without `anyone`, calls on untraced objects skip them."""
    arguments = [*node.args.posonlyargs, *node.args.args]
    this: ast.expr = ast.Constant(None)
    if arguments:
        this = _name(arguments[0].arg)
    elif node.args.vararg is not None:
        rest = node.args.vararg.arg
        first = ast.Subscript(_name(rest), ast.Constant(0), ast.Load())
        this = ast.IfExp(_name(rest), first, ast.Constant(None))
    enter: ast.expr = _call(ENTER, ast.Constant(number), this)
    if not anyone:
        # checked here, not in the probe: all objects of a class share this code, and a lookup
        # costs less than a call
        traced = ast.Compare(_call(ID, this), [ast.In()], [_name(TRACED_IDS.format(number))])
        enter = ast.IfExp(traced, enter, ast.Constant(None))
    return _with_probes(node, spec, enter)


def _name(text: str) -> ast.Name:
    return ast.Name(text, ast.Load())


def _call(function: str, *args: ast.expr) -> ast.Call:
    return ast.Call(_name(function), list(args), [])


def _located(new: _Node, old: ast.AST) -> _Node:
    """Give the line of the old node to every part of the new one that has none."""
    for node in ast.walk(new):
        if "lineno" in node._attributes and getattr(node, "lineno", None) is None:
            ast.copy_location(node, old)
    return new


def _with_probes(node: Function, spec: ProbeSpec, enter: ast.expr) -> Function:
    generator = any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in _own_nodes(node))
    probes = _Probes(spec, generator)
    args = node.args
    arguments = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    traced = [one.arg for one in arguments if one is not None and one.arg in spec.names]
    docstring = int(ast.get_docstring(node, clean=False) is not None)  # it stays first
    head, rest = node.body[:docstring], node.body[docstring:]
    # a debugger never stops in the line of a global or nonlocal statement
    silent = (ast.Global, ast.Nonlocal)
    begin_line = next((one for one in rest if not isinstance(one, silent)), (rest or head)[0])
    last_line = (rest or head)[-1]
    body: list[ast.stmt] = []
    for one in rest:
        changed = probes.visit(one)
        body += changed if isinstance(changed, list) else [changed]
    if spec.results and not generator:
        body.append(_located(ast.Expr(_call(RESULT, _name(_CALL), ast.Constant(None))), last_line))
    start: list[ast.stmt] = [ast.Assign([ast.Name(_CALL, ast.Store())], enter)]
    start += [ast.Expr(probes.probe(one)) for one in traced]
    node.body = [*head, *[_located(one, begin_line) for one in (*start, *body)]]
    return node


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            yield from _own_nodes(child)


_Binding: TypeAlias = "tuple[str, str | None]"


def _bindings(target: ast.AST) -> Iterator[_Binding]:
    """Yield each name that a target binds, with the part that it sets (None: the whole)."""
    if isinstance(target, ast.Name):
        yield target.id, None
    elif isinstance(target, (ast.Tuple, ast.List)):
        for one in target.elts:
            yield from _bindings(one)
    elif isinstance(target, ast.Starred):
        yield from _bindings(target.value)
    elif isinstance(target, (ast.Attribute, ast.Subscript)):
        part = "*"
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            if isinstance(target, ast.Attribute):
                part = target.attr
            else:
                part = str(target.slice.value) if isinstance(target.slice, ast.Constant) else "*"
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id, part


class _Probes(ast.NodeTransformer):
    """Inserts probes into the body of one function."""

    def __init__(self, spec: ProbeSpec, generator: bool) -> None:
        self.spec = spec
        self.generator = generator

    def probe(self, name: str, part: str | None = None) -> ast.BoolOp:
        """Return an expression that reports a binding of the name, or of a part of its value.

        It runs the probe only in a call that somebody traces.
        """
        args: list[ast.expr] = [_name(_CALL), ast.Constant(name), _name(name)]
        if part is not None:
            args.append(ast.Constant(part))
        untraced = ast.Compare(_name(_CALL), [ast.Is()], [ast.Constant(None)])
        return ast.BoolOp(ast.Or(), [untraced, _call(BIND, *args)])

    def _traced(self, *targets: ast.AST | None) -> list[_Binding]:
        bindings = [one for target in targets if target is not None for one in _bindings(target)]
        return [one for one in dict.fromkeys(bindings) if one[0] in self.spec.names]

    def _probes(self, location: ast.AST, *targets: ast.AST | None) -> list[ast.stmt]:
        probes = [ast.Expr(self.probe(*one)) for one in self._traced(*targets)]
        return [_located(one, location) for one in probes]

    def _after(self, node: ast.stmt, *targets: ast.AST) -> list[ast.stmt]:
        return [node, *self._probes(node, *targets)]

    # statements

    def visit_Assign(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> list[ast.stmt]:
        self.generic_visit(node)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return self._after(node, *targets) if node.value is not None else [node]

    visit_AugAssign = visit_AnnAssign = visit_Assign  # noqa: N815

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> list[ast.stmt]:
        names = [one.asname or one.name.partition(".")[0] for one in node.names]
        return self._after(node, *[_name(one) for one in names])

    visit_ImportFrom = visit_Import  # noqa: N815

    def _in_body(self, node: _Block, location: ast.AST, *targets: ast.AST | None) -> _Block:
        self.generic_visit(node)
        node.body[:0] = self._probes(location, *targets)
        return node

    def visit_For(self, node: ast.For | ast.AsyncFor) -> ast.AST:
        return self._in_body(node, node.target, node.target)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> ast.AST:
        return self._in_body(node, node, *[one.optional_vars for one in node.items])

    visit_AsyncFor, visit_AsyncWith = visit_For, visit_With  # noqa: N815

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        return self._in_body(node, node, _name(node.name) if node.name else None)

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        patterns = list(ast.walk(node.pattern))
        names = [getattr(one, "name", None) or getattr(one, "rest", None) for one in patterns]
        return self._in_body(node, node.pattern, *[_name(one) for one in names if one])

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        self.generic_visit(node)
        if not self.generator:
            self._report_result(node)
        return node

    # expressions

    def visit_Yield(self, node: ast.Yield) -> ast.expr:
        self.generic_visit(node)
        self._report_result(node)
        return node

    def _report_result(self, node: ast.Return | ast.Yield) -> None:
        if self.spec.results:
            value = node.value or ast.Constant(None)
            node.value = _located(_call(RESULT, _name(_CALL), value), node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        self.generic_visit(node)
        name = node.target.id
        if name in self.spec.names:
            probe = _call(BIND_ALWAYS, _name(_CALL), ast.Constant(name), node.value)
            node.value = _located(probe, node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and not node.args and not node.keywords:
            if node.func.id in ("locals", "vars", "dir"):  # our variables must not be in them
                return _located(_call(LOCALS, node), node)
        return node

    def _comprehension(self, node: ast.expr) -> ast.expr:
        self.generic_visit(node)
        for one in node.generators:  # type: ignore[attr-defined]
            conditions = [self.probe(*binding) for binding in self._traced(one.target)]
            for condition in conditions:  # a tuple is true whatever the probe returns
                condition.values[1] = ast.Tuple([condition.values[1]], ast.Load())
            one.ifs[:0] = [_located(condition, one.target) for condition in conditions]
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815

    # nested scopes, which are not traced

    def visit_FunctionDef(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) -> list[ast.stmt]:
        return self._after(node, _name(node.name))

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        return node
