"""A function compiled anew from its source, with a probe after each binding of a wanted name.

The whole file is compiled, so that closures, ``super()``, decorators and line numbers hold; only
the one function is another than before. First the file is compiled as it stands: if that does not
give the code that runs, the source on disk is not what runs, and nothing is rewritten.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import CodeType
from typing import Any, TypeAlias, TypeVar

from tensortap.sources.tracing.wanted import Wanted

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda"
_Node = TypeVar("_Node", bound=ast.AST)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

ENTER, INNER, SEE, PASS, GIVE, LEAVE, LOCALS = (
    "__tensortap_enter__", "__tensortap_inner__", "__tensortap_see__", "__tensortap_pass__",
    "__tensortap_give__", "__tensortap_leave__", "__tensortap_locals__",
)  # fmt: skip
ID, IDS = "__tensortap_id__", "__tensortap_ids_{}__"
CALL = "__tensortap_call{}__"  # a name that ends in two underscores is never mangled


class NoSource(Exception):
    """The source of a function cannot be used, and why."""


def rewritten(
    code: CodeType, names: dict[str, Any], wanted: Wanted, number: int, anyone: bool = True
) -> CodeType:
    """The code of a function with probes in it; `number` is what it says when it is entered.

    `names` are the global names of its module, which may know where its source is.

    Unless it is wanted for `anyone`, it looks first whether the object that it is called on is
    one of those that it is wanted for.
    """
    tree, compiled = _file(code.co_filename, names)
    if not any(_same(one, code) for one in _codes(compiled)):
        raise NoSource(f"{code.co_filename} is not what runs: it was changed since it was loaded")
    alike = None
    for node in ast.walk(tree):
        if not isinstance(node, _FUNCTIONS) or not _begins(node, code):
            continue
        found, sure = _compile_with(tree, node, code, wanted, number, anyone)
        # of two lambdas in a line the right one is that whose code is not there any more; where
        # both are alike in everything, either is right
        if sure and found is not None:
            return found
        alike = alike or found
    if alike is not None:
        return alike
    raise NoSource(f"line {code.co_firstlineno} of {code.co_filename} is no function")


def _compile_with(
    tree: ast.Module, node: Function, code: CodeType, wanted: Wanted, number: int, anyone: bool
) -> tuple[CodeType | None, bool]:
    """The code with probes in this node, and whether the code that runs is of this node."""
    changed = _Changed(tree, node)
    with_probes = _with_probes(changed.copy, wanted, _enter(changed.copy, number, anyone), 0, {})
    try:
        compiled = compile(changed.put(with_probes), code.co_filename, "exec", dont_inherit=True)
    finally:
        changed.put_back()
    sure = not any(_same(one, code) for one in _codes(compiled))
    for one in _codes(compiled):
        if ENTER in one.co_names and one.co_firstlineno == code.co_firstlineno:
            if one.co_freevars != code.co_freevars:
                raise NoSource(f"{code.co_name} cannot be compiled apart from where it was made")
            return one, sure
    return None, sure


class _Changed:
    """One function of a tree, replaced for a while."""

    def __init__(self, tree: ast.Module, node: Function) -> None:
        self.tree = tree
        self.node = node
        self.copy = _copied(node)

    def put(self, other: ast.AST) -> ast.Module:
        self._swap(self.node, other)
        self._other = other
        return self.tree

    def put_back(self) -> None:
        self._swap(self._other, self.node)

    def _swap(self, old: ast.AST, new: ast.AST) -> None:
        for parent in ast.walk(self.tree):
            for name, value in ast.iter_fields(parent):
                if value is old:
                    setattr(parent, name, new)
                    return
                if isinstance(value, list) and any(one is old for one in value):
                    value[:] = [new if one is old else one for one in value]
                    return


def _copied(node: Function) -> Function:
    import copy

    return copy.deepcopy(node)


# -- the file ----------------------------------------------------------------------------

_files: dict[str, tuple[str, ast.Module, CodeType]] = {}


def _file(name: str, names: dict[str, Any]) -> tuple[ast.Module, CodeType]:
    linecache.checkcache(name)
    text = "".join(linecache.getlines(name, names))
    if not text:
        raise NoSource(f"there is no source of {name}")
    known = _files.get(name)
    if known is None or known[0] != text:
        try:
            tree = ast.parse(text, name)
            compiled = compile(tree, name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise NoSource(f"{name} cannot be compiled: {error}") from None
        if len(_files) >= 16:
            _files.clear()
        known = _files[name] = (text, tree, compiled)
    return known[1], known[2]


def forget_files() -> None:
    """Let go of what was read: trees take a lot of memory."""
    _files.clear()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _same(a: CodeType, b: CodeType) -> bool:
    return (
        a.co_name == b.co_name
        and a.co_firstlineno == b.co_firstlineno
        and a.co_code == b.co_code
        and a.co_names == b.co_names
        and a.co_varnames == b.co_varnames
        and a.co_freevars == b.co_freevars
        and a.co_cellvars == b.co_cellvars
        and list(a.co_lines()) == list(b.co_lines())
        and getattr(a, "co_qualname", "") == getattr(b, "co_qualname", "")
        and _columns(a) == _columns(b)
        and len(a.co_consts) == len(b.co_consts)
        and all(_equal(x, y) for x, y in zip(a.co_consts, b.co_consts, strict=True))
    )


def _columns(code: CodeType) -> list[object]:
    return list(code.co_positions()) if hasattr(code, "co_positions") else []


def _equal(a: object, b: object) -> bool:
    if isinstance(a, CodeType) and isinstance(b, CodeType):
        return _same(a, b)
    if isinstance(a, frozenset):
        return a == b  # its order is nobody's
    return type(a) is type(b) and repr(a) == repr(b)  # -0.0, nan, and 1 is not True


def _begins(node: Function, code: CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    first = min([node.lineno, *[one.lineno for one in node.decorator_list]])
    return node.name == code.co_name and first == code.co_firstlineno


# -- probes ------------------------------------------------------------------------------


def _name(text: str) -> ast.Name:
    return ast.Name(text, ast.Load())


def _call(function: str, *args: ast.expr) -> ast.Call:
    return ast.Call(_name(function), list(args), [])


def _unless_idle(call: str, probe: ast.expr) -> ast.expr:
    """The probe, only where the call is one that somebody wants: nothing is called otherwise."""
    idle = ast.Compare(_name(call), [ast.Is()], [ast.Constant(None)])
    return ast.BoolOp(ast.Or(), [idle, probe])


def _enter(node: Function, number: int, anyone: bool) -> ast.expr:
    arguments = [*node.args.posonlyargs, *node.args.args]
    this: ast.expr = ast.Constant(None)
    if arguments:
        this = _name(arguments[0].arg)
    elif node.args.vararg is not None:
        rest = node.args.vararg.arg
        first = ast.Subscript(_name(rest), ast.Constant(0), ast.Load())
        this = ast.IfExp(_name(rest), first, ast.Constant(None))
    enter = _call(ENTER, ast.Constant(number), this)
    if anyone:
        return enter
    # here, not in the probe: all objects of a class share this code, and a call costs more
    known = ast.Compare(_call(ID, this), [ast.In()], [_name(IDS.format(number))])
    return ast.IfExp(known, enter, ast.Constant(None))


def _with_probes(
    node: Function, wanted: Wanted, enter: ast.expr, depth: int, outer: dict[str, str]
) -> Function:
    call = CALL.format(depth)
    scope = {**outer, **dict.fromkeys(wanted.names, call)}
    args = node.args
    named = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    given = [one.arg for one in named if one is not None and one.arg in wanted.names]
    if isinstance(node, ast.Lambda):
        probes = _Probes(scope, wanted, call, depth, generator=False)
        body = probes.visit(node.body)
        if wanted.returns:
            body = _call(GIVE, _name(call), body)
        begin: list[ast.expr] = [ast.NamedExpr(ast.Name(call, ast.Store()), enter)]
        begin += [
            _unless_idle(call, _call(SEE, _name(call), ast.Constant(one), _name(one)))
            for one in given
        ]
        whole = ast.Subscript(ast.Tuple([*begin, body], ast.Load()), ast.Constant(-1), ast.Load())
        node.body = _placed(whole, node.body)
        return node
    generator = any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in _own(node))
    probes = _Probes(scope, wanted, call, depth, generator)
    # a docstring stays where it is
    first = node.body[0]
    kept = 0
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        kept = int(isinstance(first.value.value, str))
    head, rest = node.body[:kept], node.body[kept:]
    silent = (
        ast.Global,
        ast.Nonlocal,
    )  # lines that nothing is done in: a debugger never stops there
    where = next((one for one in rest if not isinstance(one, silent)), (rest or head)[0])
    last = (rest or head)[-1]
    start: list[ast.stmt] = [ast.Assign([ast.Name(call, ast.Store())], enter)]
    start += [probes.seen(one) for one in given]
    body_now: list[ast.stmt] = []
    for one in rest:
        changed = probes.visit(one)
        body_now += changed if isinstance(changed, list) else [changed]
    if wanted.returns and not generator:
        end = ast.Expr(_call(GIVE, _name(call), ast.Constant(None)))
        body_now.append(_placed(end, last))
    if wanted.leaves:
        leave = ast.Expr(_unless_idle(call, _call(LEAVE, _name(call))))
        body_now = body_now or [ast.Pass()]
        body_now = [ast.Try(body_now, [], [], [_placed(leave, last)])]
    node.body = [*head, *[_placed(one, where) for one in (*start, *body_now)]]
    return node


def _placed(new: _Node, old: ast.AST) -> _Node:
    """A new node at the place of an old one; what had a place of its own keeps it."""
    for node in ast.walk(new):
        if "lineno" in node._attributes and getattr(node, "lineno", None) is None:
            ast.copy_location(node, old)
    return new


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """What is in a function, without what is in functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            yield from _own(child)


def _targets(node: ast.AST) -> Iterator[tuple[str, str | None, bool]]:
    """Every name that a target binds, or whose parts it sets: (name, first part, whole or not)."""
    if isinstance(node, ast.Name):
        yield node.id, None, True
    elif isinstance(node, (ast.Tuple, ast.List)):
        for one in node.elts:
            yield from _targets(one)
    elif isinstance(node, ast.Starred):
        yield from _targets(node.value)
    elif isinstance(node, (ast.Attribute, ast.Subscript)):
        via: str | None = None
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            via = node.attr if isinstance(node, ast.Attribute) else _key(node.slice)
            node = node.value
        if isinstance(node, ast.Name):
            yield node.id, via, False


def _key(node: ast.AST) -> str | None:
    return str(node.value) if isinstance(node, ast.Constant) else None


class _Probes(ast.NodeTransformer):
    """Puts probes into the body of one function; `scope` is which call sees which name."""

    def __init__(
        self, scope: dict[str, str], wanted: Wanted, call: str, depth: int, generator: bool
    ) -> None:
        self.scope = scope
        self.wanted = wanted
        self.call = call
        self.depth = depth
        self.generator = generator

    def seen(self, name: str, via: str | None = None, whole: bool = True) -> ast.stmt:
        return ast.Expr(self._probe(name, via, whole))

    def _probe(self, name: str, via: str | None = None, whole: bool = True) -> ast.expr:
        call = self.scope[name]
        args: list[ast.expr] = [_name(call), ast.Constant(name), _name(name)]
        if not whole:
            args.append(ast.Constant("*" if via is None else via))
        return _unless_idle(call, _call(SEE, *args))

    def _after(self, node: ast.stmt, *targets: ast.AST) -> list[ast.stmt]:
        found = [one for target in targets for one in _targets(target) if one[0] in self.scope]
        return [node, *[_placed(self.seen(*one), node) for one in dict.fromkeys(found)]]

    def _first(self, body: list[ast.stmt], place: ast.AST, *targets: ast.AST | None) -> None:
        found = [
            one
            for target in targets
            if target is not None
            for one in _targets(target)
            if one[0] in self.scope
        ]
        body[:0] = [_placed(self.seen(*one), place) for one in dict.fromkeys(found)]

    # statements

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        value = node.value
        target = node.targets[0]
        if isinstance(value, ast.Lambda) and isinstance(target, ast.Name):
            node.value = self._nested(value, target.id)  # type: ignore[assignment]
        self.generic_visit(node) if node.value is value else None
        return self._after(node, *node.targets)

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        self.generic_visit(node)
        return self._after(node, node.target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> list[ast.stmt]:
        self.generic_visit(node)
        return self._after(node, node.target) if node.value is not None else [node]

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> list[ast.stmt]:
        names = [one.asname or one.name.partition(".")[0] for one in node.names]
        return self._after(node, *[_name(one) for one in names])

    visit_ImportFrom = visit_Import  # noqa: N815

    def visit_For(self, node: ast.For | ast.AsyncFor) -> ast.stmt:
        self.generic_visit(node)
        self._first(node.body, node.target, node.target)
        return node

    visit_AsyncFor = visit_For  # noqa: N815

    def visit_With(self, node: ast.With | ast.AsyncWith) -> ast.stmt:
        self.generic_visit(node)
        self._first(node.body, node, *[one.optional_vars for one in node.items])
        return node

    visit_AsyncWith = visit_With  # noqa: N815

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        self.generic_visit(node)
        self._first(node.body, node, _name(node.name) if node.name else None)
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.match_case:
        self.generic_visit(node)
        names = [
            getattr(one, "name", None) or getattr(one, "rest", None)
            for one in ast.walk(node.pattern)
        ]
        self._first(node.body, node.pattern, *[_name(one) for one in names if one])
        return node

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        self.generic_visit(node)
        if self.wanted.returns and not self.generator:
            value = node.value or ast.Constant(None)
            node.value = _placed(_call(GIVE, _name(self.call), value), node)
        return node

    # expressions

    def visit_Yield(self, node: ast.Yield) -> ast.expr:
        self.generic_visit(node)
        if self.wanted.returns:
            value = node.value or ast.Constant(None)
            node.value = _placed(_call(GIVE, _name(self.call), value), node)
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        self.generic_visit(node)
        name = node.target.id
        if name in self.scope:
            args = [_name(self.scope[name]), ast.Constant(name), node.value]
            node.value = _placed(_call(PASS, *args), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and not node.args and not node.keywords:
            if node.func.id in ("locals", "vars", "dir"):  # ours is not to be among them
                return _placed(_call(LOCALS, node), node)
        return node

    def _comprehension(self, node: ast.expr) -> ast.expr:
        self.generic_visit(node)
        for one in node.generators:  # type: ignore[attr-defined]
            found = [found for found in _targets(one.target) if found[0] in self.scope]
            # a tuple is true whatever is in it
            conditions: list[ast.expr] = []
            for name, via, whole in found:
                probe = self._probe(name, via, whole)
                assert isinstance(probe, ast.BoolOp)
                probe.values[1] = ast.Tuple([probe.values[1]], ast.Load())
                conditions.append(_placed(probe, one.target))
            one.ifs[:0] = conditions
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815

    # scopes of their own

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
        new = self._nested(node, node.name)
        return self._after(new, _name(node.name))  # type: ignore[arg-type]

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        return self._nested(node, "<lambda>")  # type: ignore[return-value]

    def visit_ClassDef(self, node: ast.ClassDef) -> list[ast.stmt]:
        # what its body binds are attributes of the class
        return self._after(node, _name(node.name))

    def _nested(self, node: Function, name: str) -> Function:
        inside = self.wanted.inner.get(name)
        # a name that it declares nonlocal is ours
        free = {
            one
            for part in _own(node)
            if isinstance(part, ast.Nonlocal)
            for one in part.names
            if one in self.scope
        }
        outer = {one: self.scope[one] for one in free}
        if inside is not None:
            enter = _call(INNER, _name(self.call), ast.Constant(name))
            return _with_probes(node, inside, enter, self.depth + 1, outer)
        if outer:
            probes = _Probes(outer, Wanted(), self.call, self.depth, generator=False)
            probes.generic_visit(node)
        return node
