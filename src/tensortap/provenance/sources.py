"""What the source of a file binds a name to, answered in a process of its own.

Parsing takes long and holds the interpreter lock, so `modifications` asks this file, started
as a script: questions on standard input, answers on standard output, one line of JSON each. It
imports nothing but the standard library, and nothing at all of the code that it reads.

A question is ``[file, scope, name, all]``: the scope is the qualified name of a class, or "" for
the module. Unless ``all`` is true, only a name with a ``def`` or ``class`` is of interest, and a
file without one is searched but not parsed. The answer is null if there is no such source or
scope, or nothing of interest, else::

    {"defs": [[line, last line, decorated], …],   def and class statements with that name
     "other": bool,                               assigned, imported, global in a function, …
     "imports": ["torch", …],                     what imports of that name import from
     "star": bool,                                the module has a star import
     "assigned": bool,                            Class.name = … or setattr(Class, …) elsewhere
     "decorated": bool}                           the class is
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tokenize
import warnings
from typing import Any

LARGEST = 8 << 20  # bytes of source; beyond that it is generated, and nobody patches it


class File:
    """The bindings of one file, by scope and name."""

    def __init__(self, tree: ast.Module) -> None:
        self.scopes: dict[str, dict[str, list[ast.AST]]] = {}
        self.classes: dict[str, list[ast.ClassDef]] = {}
        self.globals: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()  # (Class, name) that is assigned to
        self.dynamic: set[str] = set()  # classes that setattr is called with; "*": any
        self.star = False
        self._walk(tree.body, "", None, in_function=False)

    def _bind(self, scope: str, name: str, node: ast.AST) -> None:
        self.scopes.setdefault(scope, {}).setdefault(name, []).append(node)

    def _walk(self, body: list[ast.stmt], scope: str, owner: str | None, in_function: bool) -> None:
        for node in body:
            self._statement(node, scope, owner, in_function)

    def _statement(self, node: ast.AST, scope: str, owner: str | None, in_function: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._bind(scope, _mangled(node.name, owner), node)
            self._walk(node.body, f"{_join(scope, node.name)}.<locals>", None, in_function=True)
        elif isinstance(node, ast.ClassDef):
            self._bind(scope, _mangled(node.name, owner), node)
            inner = _join(scope, node.name)
            self.scopes.setdefault(inner, {})
            self.classes.setdefault(inner, []).append(node)
            self._walk(node.body, inner, node.name, in_function)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, scope, owner)
        elif isinstance(node, ast.Global):
            self.globals.update(node.names)
        else:
            self._expressions(node, scope, owner)
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                for child in getattr(node, field, ()) if not isinstance(node, ast.expr) else ():
                    if isinstance(child, ast.stmt):
                        self._statement(child, scope, owner, in_function)
                    elif isinstance(child, (ast.ExceptHandler, *_CASES)):
                        self._walk(child.body, scope, owner, in_function)

    def _expressions(self, node: ast.AST, scope: str, owner: str | None) -> None:
        """Names and attributes that are bound by anything but def, class and import."""
        todo = [c for c in ast.iter_child_nodes(node) if not isinstance(c, _BLOCKS)]
        while todo:
            part = todo.pop()
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                self._bind(scope, _mangled(part.id, owner), part)
            elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                if isinstance(part.value, (ast.Name, ast.Attribute)):
                    self.attributes.add((ast.unparse(part.value).rpartition(".")[2], part.attr))
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
                if part.func.id == "setattr" and part.args:
                    first = part.args[0]
                    self.dynamic.add(first.id if isinstance(first, ast.Name) else "*")
            elif _writes_namespace(part):
                self.dynamic.add("")
            todo.extend(c for c in ast.iter_child_nodes(part) if not isinstance(c, _BLOCKS))

    def _import(self, node: ast.Import | ast.ImportFrom, scope: str, owner: str | None) -> None:
        for alias in node.names:
            if alias.name == "*":
                self.star = True
            name = alias.asname or alias.name.partition(".")[0]
            self._bind(scope, _mangled(name, owner), node)

    def answer(self, scope: str, name: str) -> dict[str, Any] | None:
        if scope and scope not in self.classes:
            return None
        bound = self.scopes.get(scope, {}).get(name, [])
        defs, imports, other = [], set(), False
        for node in bound:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                defs.append([first, node.end_lineno, bool(node.decorator_list)])
                continue
            other = True
            if isinstance(node, ast.ImportFrom) and not node.level:
                imports.add((node.module or "").partition(".")[0])
            elif isinstance(node, ast.Import):
                imports.update(a.name.partition(".")[0] for a in node.names)
            else:
                imports.add("")  # relative, or not an import: of the package itself
        last = scope.rpartition(".")[2]
        return {
            "defs": defs,
            "other": other or (not scope and (name in self.globals or "" in self.dynamic)),
            "imports": sorted(imports),
            "star": self.star,
            "assigned": (last, name) in self.attributes or bool({last, "*", "cls"} & self.dynamic),
            "decorated": any(c.decorator_list for c in self.classes.get(scope, ())),
        }


_CASES = (ast.match_case,)
_BLOCKS = (ast.stmt, ast.ExceptHandler, *_CASES)


def _writes_namespace(node: ast.AST) -> bool:
    """``globals()[name] = …``, ``globals().update(…)``, and the same with vars and locals."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        call: ast.AST = node.value
    elif isinstance(node, ast.Attribute) and node.attr in ("update", "setdefault"):
        call = node.value
    else:
        return False
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("globals", "vars", "locals")
    )


def _join(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name


def _mangled(name: str, owner: str | None) -> str:
    """Names with two underscores, as a class keeps them."""
    if owner is None or not name.startswith("__") or name.endswith("__"):
        return name
    return f"_{owner.lstrip('_')}{name}" if owner.strip("_") else name


def read(file: str) -> str | None:
    """The text of a source file, or None: it cannot be read, or is too large."""
    try:
        if os.path.getsize(file) > LARGEST:
            return None
        with tokenize.open(file) as lines:  # knows about the coding line
            return lines.read()
    except (OSError, SyntaxError, ValueError):
        return None


def parse(text: str) -> File | None:
    """The bindings of a file, or None: it is no Python, or not of this version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the source's own invalid escapes
            return File(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def answer(questions: list[tuple[str, str, str, bool]]) -> list[dict[str, Any] | None]:
    """Answers, in the order of the questions; each file is read once.

    >>> answer([(__file__, "", "read", True)])[0]["defs"][0][2]
    False
    """
    by_file: dict[str, list[int]] = {}
    for at, (file, *_) in enumerate(questions):
        by_file.setdefault(file, []).append(at)
    answers: list[dict[str, Any] | None] = [None] * len(questions)
    for file, asked in by_file.items():
        text = read(file)
        if text is None:
            continue
        asked = [at for at in asked if questions[at][3] or _defines(text, questions[at][2])]
        bindings = parse(text) if asked else None
        if bindings is not None:
            for at in asked:
                _, scope, name, _ = questions[at]
                answers[at] = bindings.answer(scope, name)
    return answers


def _defines(text: str, name: str) -> bool:
    short = name[name.find("__", 1) :] if name.startswith("_") and "__" in name[1:] else name
    for bound in {name, short}:
        if f"def {bound}" in text or f"class {bound}" in text:
            if re.search(rf"\b(def|class)\s+{re.escape(bound)}\b", text):
                return True
    return False


def main() -> None:
    """Answer the questions on standard input."""
    if hasattr(os, "nice"):
        os.nice(19)  # training has the right of way
    for found in answer([json.loads(line) for line in sys.stdin]):
        print(json.dumps(found))  # noqa: T201 - it is what the script is for


if __name__ == "__main__":
    main()
