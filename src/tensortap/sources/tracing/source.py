"""Functions compiled again from their source file, with probes in them.

The whole file is compiled, so that closures, ``super()``, decorators and line numbers stay
correct; only the one function differs. If the unchanged file does not compile to the code that
runs, the file has been edited and is not used.
"""

from __future__ import annotations

import ast
import copy
import linecache
import operator
from types import CodeType
from typing import Any

from tensortap.errors import TensortapError
from tensortap.sources.tracing.functions import code_objects
from tensortap.sources.tracing.rewrite import ENTER, FUNCTIONS, Function, ProbeSpec, insert_probes

_cache: dict[str, tuple[str, ast.Module, CodeType]] = {}
_CACHED_FILES = 16
_compared = operator.attrgetter(
    "co_name", "co_qualname", "co_firstlineno", "co_code", "co_names", "co_varnames",
    "co_freevars", "co_cellvars", "co_linetable",
)  # fmt: skip


class NoSource(TensortapError):
    """A function cannot be compiled again from its source, with the reason."""


def instrumented_code(
    code: CodeType, names: dict[str, Any], spec: ProbeSpec, number: int, anyone: bool = True
) -> CodeType:
    """Return the code of a function with probes; `number` identifies the function in them.

    `names` are the globals of its module, which may know where its source is. Unless `anyone`,
    the code first checks that it is called on an object that somebody traces.
    """
    tree, compiled = _parsed_file(code.co_filename, names)
    if not any(_same(one, code) for one in code_objects(compiled)):
        raise NoSource(f"{code.co_filename} has been edited since it was loaded")
    fallback = None
    for node in ast.walk(tree):
        if not isinstance(node, FUNCTIONS) or not _starts(node, code):
            continue
        found, replaced = _compile_with_probes(tree, node, code, spec, number, anyone)
        # Of several lambdas in one line, the right one makes the original code disappear.
        # Where two are equal in everything, either is right.
        if found is not None and replaced:
            return found
        fallback = fallback or found
    if fallback is None:
        raise NoSource(f"no function starts at line {code.co_firstlineno} of {code.co_filename}")
    return fallback


def _compile_with_probes(
    tree: ast.Module, node: Function, code: CodeType, spec: ProbeSpec, number: int, anyone: bool
) -> tuple[CodeType | None, bool]:
    """Return the node's code with probes, and whether that replaced the code that runs."""
    body = node.body
    node.body = insert_probes(copy.deepcopy(node), spec, number, anyone).body
    try:
        compiled = compile(tree, code.co_filename, "exec", dont_inherit=True)
    finally:
        node.body = body
    replaced = not any(_same(one, code) for one in code_objects(compiled))
    for one in code_objects(compiled):
        if ENTER in one.co_names and one.co_firstlineno == code.co_firstlineno:
            if one.co_freevars != code.co_freevars:
                raise NoSource(f"{code.co_name} has other free variables when compiled again")
            return one, replaced
    return None, replaced


def _parsed_file(name: str, names: dict[str, Any]) -> tuple[ast.Module, CodeType]:
    linecache.checkcache(name)
    text = "".join(linecache.getlines(name, names))
    if not text:
        raise NoSource(f"{name} has no source")
    cached = _cache.get(name)
    if cached is None or cached[0] != text:
        try:
            tree = ast.parse(text, name)
            compiled = compile(tree, name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise NoSource(f"{name} cannot be compiled: {error}") from None
        if len(_cache) >= _CACHED_FILES:
            _cache.clear()
        cached = _cache[name] = (text, tree, compiled)
    return cached[1], cached[2]


def clear_cache() -> None:
    """Release the parsed files: trees take a lot of memory."""
    _cache.clear()


def _same(a: CodeType, b: CodeType) -> bool:
    # not ``==``: it ignores line tables on Python 3.11, and on 3.12 code that a debugger or a
    # coverage tool monitors differs from the same code without it
    return (
        _compared(a) == _compared(b)
        and len(a.co_consts) == len(b.co_consts)
        and all(_equal(x, y) for x, y in zip(a.co_consts, b.co_consts, strict=True))
    )


def _equal(a: object, b: object) -> bool:
    if isinstance(a, CodeType) and isinstance(b, CodeType):
        return _same(a, b)
    if isinstance(a, frozenset):
        return a == b  # its order may differ
    return type(a) is type(b) and repr(a) == repr(b)  # tells -0.0 from 0.0, and 1 from True


def _starts(node: Function, code: CodeType) -> bool:
    """Return whether the node has the name and the first line of the code."""
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    first = min([node.lineno, *[one.lineno for one in node.decorator_list]])
    return node.name == code.co_name and first == code.co_firstlineno
