"""Functions, methods and classes of installed packages that other code has replaced.

The finder looks at the modules as they are now, so it also finds a patch that was made before
tensortap was imported. It reads plain dictionaries only: nothing is imported and no lazy attribute
is triggered. Code belongs to the package that its file was installed with, or to the project.

* Code of the project in a package or in the standard library is always a modification.
* Code of one package in another is a modification where the source of the latter has a plain
  ``def`` or ``class`` of that name; otherwise it is an import, a decorator, or generated.

Not reported: replacements within the project or within one package, and what packages do to the
standard library (torch replaces ``inspect.getfile`` when it is imported).
"""

from __future__ import annotations

import functools
import re
import sys
import tokenize
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tensortap.provenance.pace import Pace
from tensortap.provenance.project import PROJECT, PYTHON, Owners, project_folder

_HOOKS = frozenset(  # attributes that Python offers for replacement
    """sys.excepthook sys.displayhook sys.unraisablehook sys.breakpointhook threading.excepthook
    warnings.showwarning warnings.formatwarning warnings._showwarnmsg warnings._showwarnmsg_impl
    builtins._ builtins.display builtins.get_ipython builtins.exit builtins.quit
    logging._warnings_showwarning linecache.getlines linecache.checkcache pdb.set_trace""".split()
)


class Modification(NamedTuple):
    """The code that stands in for a function, method or class of a package.

    `kind` is "replaced", "code" (the function is the original, its ``__code__`` is not),
    "overrides" (a base class has the original) or "added" (there was no original).
    """

    kind: str
    by: str  # "__main__.new_forward"
    module: str
    file: str | None
    line: int | None
    original: str | None  # "file:line" of the definition, or the method of the base class


class _Namespace(NamedTuple):
    """A module, or a class."""

    owner: str
    file: str
    module: str
    scope: str = ""  # qualified name of the class
    cls: Any = None


class _Origin(NamedTuple):
    """Where a value was defined."""

    owner: str
    module: str
    name: str
    file: str = ""
    line: int = 0


class Finder:
    """Finds the modifications in all loaded modules."""

    def __init__(self, root: Path | None = None, *, pace: Pace | None = None) -> None:
        self._owners = Owners(root or project_folder())
        self._pace = pace or Pace(rest=0)

    def find(self) -> dict[str, Modification]:
        """Return the modifications by the qualified name of what they replace."""
        found = {}
        for namespace, content in self._namespaces():
            for key in list(content):
                self._pace()
                for value in _functions(content.get(key)):
                    modification = self._examine(namespace, key, value)
                    if modification is not None:
                        parts = (namespace.module, namespace.scope, key)
                        found[".".join(filter(None, parts))] = modification
        return {where: found[where] for where in sorted(found.keys() - _HOOKS)}

    def _namespaces(self) -> Iterator[tuple[_Namespace, Mapping[str, Any]]]:
        """Yield the modules of packages and the classes that are defined in them."""
        seen: set[int] = set()
        for name, module in list(sys.modules.items()):
            if not issubclass(type(module), types.ModuleType) or id(module) in seen:
                continue
            seen.add(id(module))
            content = object.__getattribute__(module, "__dict__")
            file = _text(content.get("__file__"))
            owner = self._owners.of(file, name)
            if owner == PROJECT:
                continue
            yield _Namespace(owner, file, name), content
            classes = list(content.values())
            while classes:
                self._pace()
                cls = classes.pop()
                if not issubclass(type(cls), type) or id(cls) in seen:
                    continue
                seen.add(id(cls))
                if self._owner_of(cls) == owner:
                    yield self._class_namespace(cls, owner), _get(cls, "__dict__")
                    classes += _get(cls, "__dict__").values()

    def _owner_of(self, cls: type) -> str:
        module = _text(_get(cls, "__module__"))
        return self._owners.of(_file_of(module), module)

    def _class_namespace(self, cls: type, owner: str) -> _Namespace:
        module, scope = _text(_get(cls, "__module__")), _get(cls, "__qualname__")
        # the file of its methods: many classes claim to belong to another module
        methods = (v for v in list(_get(cls, "__dict__").values()) if type(v) is types.FunctionType)
        files = (v.__code__.co_filename for v in methods if v.__qualname__.startswith(scope))
        own = (file for file in files if self._owners.of(file, module) == owner)
        return _Namespace(owner, next(own, _file_of(module)), module, scope, cls)

    def _origin(self, value: Any) -> _Origin | None:
        if type(value) is types.FunctionType:
            code, module = value.__code__, _text(value.__globals__.get("__name__"))
            file = code.co_filename
            if file.startswith("<") and module not in sys.modules:
                return None  # generated by namedtuple, by attrs, from a template
            owner = self._owners.of("" if file.startswith("<") else file, module)
            return _Origin(owner, module, code.co_qualname, file, code.co_firstlineno)
        if issubclass(type(value), type):
            module = _text(_get(value, "__module__"))
            file = _file_of(module)
            return _Origin(self._owner_of(value), module, _get(value, "__qualname__"), file)
        if callable(value):
            kind = type(value)
            module = _text(_get(kind, "__module__"))
            if module == "unittest.mock" or self._owner_of(kind) == PROJECT:
                return _Origin(PROJECT, module, _get(kind, "__qualname__"))
        return None

    def _examine(self, namespace: _Namespace, key: str, value: Any) -> Modification | None:
        origin = self._origin(value)
        if origin is None or origin.owner in (namespace.owner, "tensortap"):
            return None
        if origin.owner != PROJECT:
            if not self._is_foreign(namespace, key, origin):
                return None
        elif origin.module == namespace.module == "unittest.mock":
            return None
        text, before = _source(namespace.file, namespace.scope)
        match = _definition(text, key)
        mro = _get(namespace.cls, "__mro__")[1:-1] if namespace.cls is not None else ()
        base = next((base for base in mro if key in _get(base, "__dict__")), None)
        module, kind, original = origin.module, "added", None
        if match is not None:
            line = before + text.count("\n", 0, match.start()) + 1
            kind, original = "replaced", f"{namespace.file}:{line}"
            if module == namespace.module:  # the globals of the original, so only the code is new
                module, kind = _module_of(origin.file), "code"
        elif base is not None:
            kind = "overrides"
            original = f"{_get(base, '__module__')}.{_get(base, '__qualname__')}.{key}"
        elif not text or "import *" in text or re.search(rf"\b{re.escape(key)}\b", text):
            kind = "replaced"
        by = f"{module}.{origin.name}"
        return Modification(kind, by, module, origin.file or None, origin.line or None, original)

    def _is_foreign(self, namespace: _Namespace, key: str, origin: _Origin) -> bool:
        """Return whether code of one package replaces a plain definition in another."""
        if PYTHON in (origin.owner, namespace.owner):
            return False
        if not origin.line and origin.name.rpartition(".")[2] == key:
            return False  # a class that claims to belong to another package, as those of pytest do
        cls, file = namespace.cls, namespace.file
        if not any(f"{keyword} {key}" in _read(file) for keyword in ("def", "class")):
            return False
        if cls is not None:
            makers = (*_get(cls, "__mro__")[1:], *_get(type(cls), "__mro__"))
            if any(self._owner_of(maker) == origin.owner for maker in makers):
                return False  # base classes and metaclasses may set methods
            parent, _, name = namespace.scope.rpartition(".")
            if not _is_plain(_source(file, parent)[0], name):
                return False
        return _is_plain(_source(file, namespace.scope)[0], key)


def _functions(value: Any) -> tuple[Any, ...]:
    """Return the functions in a descriptor or a partial, or the value itself."""
    kind = type(value)
    if kind in (staticmethod, classmethod, types.MethodType):
        return _functions(value.__func__)
    if kind is property:
        return value.fget, value.fset, value.fdel
    if kind in (functools.partial, functools.partialmethod, functools.cached_property):
        return (value.func,)
    return (value,)


def _get(cls: type, attribute: str) -> Any:
    """Return an attribute of a class without running code of its metaclass."""
    return type.__getattribute__(cls, attribute)


def _text(value: Any) -> str:
    return value if type(value) is str else ""


def _file_of(module: str) -> str:
    loaded = sys.modules.get(module)
    if not issubclass(type(loaded), types.ModuleType):
        return ""
    return _text(object.__getattribute__(loaded, "__dict__").get("__file__"))


def _module_of(file: str) -> str:
    return next((name for name in list(sys.modules) if _file_of(name) == file), "")


# -- the source --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _read(file: str) -> str:
    if not file.endswith(".py"):
        return ""
    try:
        with tokenize.open(file) as stream:
            return stream.read()
    except (OSError, SyntaxError, ValueError):
        return ""


def _source(file: str, scope: str) -> tuple[str, int]:
    """Return the source of a module or of a class in it, and the number of lines before it."""
    text, before = _read(file), 0
    for name in filter(None, scope.split(".")):
        head = re.search(rf"^([ \t]*)class\s+{re.escape(name)}\b.*\n", text, re.MULTILINE)
        if head is None:
            return "", 0
        end = re.compile(rf"^[ \t]{{0,{len(head[1])}}}[^\s#)]", re.M).search(text, head.end())
        before += text.count("\n", 0, head.end())
        text = text[head.end() : end.start() if end else None]
    return text, before


def _definition(text: str, key: str) -> re.Match[str] | None:
    """Find a definition in the outermost block of a source."""
    first = re.search(r"^([ \t]*)[^\s#]", text, re.MULTILINE)
    indent = first[1] if first else ""
    pattern = rf"^({indent})(?:async\s+)?(?:def|class)\s+{re.escape(key)}\b"
    return re.search(pattern, text, re.MULTILINE)


def _is_plain(text: str, key: str) -> bool:
    """Return whether a source binds a name only by a definition without decorators."""
    match = _definition(text, key)
    if match is None:
        return False
    indent = match[1]
    for line in reversed(text[: match.start()].splitlines()):
        if line.startswith(f"{indent}@"):
            return False
        if line.strip() and not line.startswith(tuple(indent + start for start in " \t#)")):
            break
    word = re.escape(key)
    rebinds = re.compile(rf"\s*{word}\s*([=:,]|$)|.*\bimport\b.*\b{word}\b|.*\bas\s+{word}\b")
    return not any(rebinds.match(line) for line in text.splitlines() if key in line)
