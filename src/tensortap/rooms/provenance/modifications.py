"""Functions, methods and classes of installed packages that other code has replaced.

The finder looks at the modules as they are now, so it also finds a patch that was made before
tensortap was imported. It reads plain dictionaries only: nothing is imported and no lazy attribute
is triggered. Code belongs to the package that its file was installed with, or to the project.

Code of the project in a package or in the standard library is a modification. What packages do to
each other or to the standard library is not reported (torch replaces ``inspect.getfile`` when it is
imported).
"""

from __future__ import annotations

import functools
import os
import re
import sys
import tokenize
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tensortap.rooms.provenance.project import PYTHON, owner_of_file, project_folder

PROJECT = "project"  # the owner of the code that runs
_HOOKS = frozenset(  # attributes that Python offers for replacement
    """sys.excepthook sys.displayhook sys.unraisablehook sys.breakpointhook threading.excepthook
    warnings.showwarning warnings.formatwarning warnings._showwarnmsg warnings._showwarnmsg_impl
    builtins._ builtins.display builtins.get_ipython builtins.exit builtins.quit
    logging._warnings_showwarning linecache.getlines linecache.checkcache pdb.set_trace""".split()
)


class Modification(NamedTuple):
    """The code that stands in for a function, method or class of a package.

    `kind` is "replaced", "overrides" (a base class has the original) or "added" (there was none).
    """

    kind: str
    by: str  # "__main__.new_forward"
    module: str
    file: str | None
    line: int | None
    original: str | None  # "file:line" of the definition, or the method of the base class


class _Place(NamedTuple):
    """A module, a class in it, or where a function is defined."""

    owner: str
    file: str
    module: str
    name: str = ""  # qualified, within the module
    line: int = 0
    cls: Any = None


class Finder:
    """Finds the modifications in all loaded modules."""

    def __init__(self, root: Path | None = None, pause: Callable[[], None] = lambda: None) -> None:
        """`pause` is called after each module."""
        root = root or project_folder()
        self._pause = pause
        self._roots = tuple(os.path.join(path, "") for path in (str(root), os.path.realpath(root)))
        self._known: dict[str, str | None] = {"": None}  # the owners of files

    def find(self) -> dict[str, Modification]:
        """Return the modifications by the qualified name of what they replace."""
        found = {}
        for place, content in self._namespaces():
            for key in list(content):
                for value in _functions(content.get(key)):
                    modification = self._examine(place, key, value)
                    if modification is not None:
                        found[".".join(filter(None, (*place[2:4], key)))] = modification
        return {where: found[where] for where in sorted(found.keys() - _HOOKS)}

    def _namespaces(self) -> Iterator[tuple[_Place, Mapping[str, Any]]]:
        """Yield the modules of packages and the classes that are defined in them."""
        seen: set[int] = set()
        for name, module in list(sys.modules.items()):
            content = _content(module)
            file = _text(content.get("__file__"))
            owner = self._owner(file, name)
            if not content or id(content) in seen or owner == PROJECT:
                continue
            seen.add(id(content))
            self._pause()
            yield _Place(owner, file, name), content
            classes = list(content.values())
            while classes:
                cls = classes.pop()
                if not issubclass(type(cls), type) or id(cls) in seen:
                    continue
                seen.add(id(cls))
                place = self._class_place(cls)
                if place.owner == owner:
                    members = _get(cls, "__dict__")
                    yield place._replace(file=self._file_of_methods(place, members)), members
                    classes += members.values()

    def _owner(self, file: str, module: str) -> str:
        """Return the owner of code: a package, "project" or "python"; `file` may be ""."""
        if file not in self._known:
            owner = owner_of_file(file)
            if owner is None and file.startswith(self._roots):
                owner = PROJECT
            self._known[file] = owner
        owner = self._known[file]
        if owner is not None:
            return owner
        top = module.partition(".")[0]
        if top in ("__main__", "__mp_main__"):
            return PROJECT
        return PYTHON if top in sys.stdlib_module_names else top

    def _class_place(self, cls: type) -> _Place:
        module = _text(_get(cls, "__module__"))
        file = _text(_content(sys.modules.get(module)).get("__file__"))
        return _Place(self._owner(file, module), file, module, _get(cls, "__qualname__"), cls=cls)

    def _file_of_methods(self, place: _Place, members: Mapping[str, Any]) -> str:
        """Return the file of a class: many classes claim to belong to another module."""
        codes = [v.__code__ for v in list(members.values()) if type(v) is types.FunctionType]
        files = [code.co_filename for code in codes if code.co_qualname.startswith(place.name)]
        own = (file for file in files if self._owner(file, place.module) == place.owner)
        return next(own, place.file)

    def _origin(self, value: Any) -> _Place | None:
        if type(value) is types.FunctionType:
            code, module = value.__code__, _text(value.__globals__.get("__name__"))
            file = code.co_filename
            if file.startswith("<") and module not in sys.modules:
                return None  # generated by namedtuple, by attrs, from a template
            owner = self._owner("" if file.startswith("<") else file, module)
            return _Place(owner, file, module, code.co_qualname, code.co_firstlineno)
        if issubclass(type(value), type):
            return self._class_place(value)
        if callable(value):
            kind = self._class_place(type(value))
            if kind.module == "unittest.mock" or kind.owner == PROJECT:
                return kind._replace(owner=PROJECT)
        return None

    def _examine(self, place: _Place, key: str, value: Any) -> Modification | None:
        origin = self._origin(value)
        if origin is None or origin.owner != PROJECT:
            return None
        if origin.module == place.module == "unittest.mock":
            return None
        text, before = _source(place.file, place.name)
        match = _definition(text, key)
        mro = _get(place.cls, "__mro__")[1:-1] if place.cls is not None else ()
        base = next((base for base in mro if key in _get(base, "__dict__")), None)
        kind, original = "added", None
        if match is not None:
            line = before + text.count("\n", 0, match.start()) + 1
            kind, original = "replaced", f"{place.file}:{line}"
        elif base is not None:
            kind = "overrides"
            original = f"{_get(base, '__module__')}.{_get(base, '__qualname__')}.{key}"
        elif not text or "import *" in text or re.search(rf"\b{re.escape(key)}\b", text):
            kind = "replaced"
        by, file = f"{origin.module}.{origin.name}", origin.file or None
        return Modification(kind, by, origin.module, file, origin.line or None, original)


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


def _content(module: Any) -> Mapping[str, Any]:
    """Return the attributes of a module without running code of a lazy one."""
    if not issubclass(type(module), types.ModuleType):
        return {}
    content: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    return content


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
