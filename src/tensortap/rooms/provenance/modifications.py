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
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tensortap.rooms.provenance.runtime import PYTHON, owner_of_file, project_folder

PROJECT = "project"  # the owner of the code that runs
_HOOKS = frozenset(  # attributes that Python offers for replacement
    """sys.excepthook sys.displayhook sys.unraisablehook sys.breakpointhook threading.excepthook
    warnings.showwarning warnings.formatwarning warnings._showwarnmsg warnings._showwarnmsg_impl
    builtins._ builtins.display builtins.get_ipython builtins.exit builtins.quit
    logging._warnings_showwarning linecache.getlines linecache.checkcache pdb.set_trace""".split()
)


_PLAIN = frozenset(  # types whose values are no code of the project
    {
        bool, int, float, str, bytes, tuple, list, dict, set, frozenset, type(None),
        types.ModuleType, types.BuiltinFunctionType, types.WrapperDescriptorType,
        types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    }
)  # fmt: skip


class Modification(NamedTuple):
    """The code that stands in for a function, method or class of a package."""

    by: str  # "__main__.new_forward"
    file: str | None
    line: int | None


class _Place(NamedTuple):
    """A module, a class in it, or where a function is defined."""

    owner: str
    file: str
    module: str
    name: str = ""  # qualified, within the module
    line: int = 0


class Finder:
    """Finds the modifications in all loaded modules."""

    def __init__(self, root: Path | None = None, pause: Callable[[], None] = lambda: None) -> None:
        """`pause` is called after each module."""
        root = root or project_folder()
        self._pause = pause
        self._roots = tuple(os.path.join(path, "") for path in (str(root), os.path.realpath(root)))
        self._known: dict[str, str | None] = {"": None}  # the owners of files
        self._places: dict[str, _Place] = {}  # of modules

    def find(self) -> dict[str, Modification]:
        """Return the modifications by the qualified name of what they replace."""
        found: dict[str, Modification] = {}
        self._places.clear()
        for place, content in self._namespaces():
            for key in list(content):
                self._look(place, key, content.get(key), found)
        return {where: found[where] for where in sorted(found.keys() - _HOOKS)}

    def _look(self, place: _Place, key: str, found: Any, into: dict[str, Modification]) -> None:
        for value in _functions(found):
            origin = self._origin(value)
            if origin is None or origin.module == place.module == "unittest.mock":
                continue
            where = ".".join(filter(None, (place.module, place.name, key)))
            by = f"{origin.module}.{origin.name}"
            into[where] = Modification(by, origin.file or None, origin.line or None)

    def _place(self, module: str) -> _Place:
        if module not in self._places:
            file = _text(_content(sys.modules.get(module)).get("__file__"))
            self._places[module] = _Place(self._owner(file, module), file, module)
        return self._places[module]

    def _namespaces(self) -> Iterator[tuple[_Place, Mapping[str, Any]]]:
        """Yield the modules of packages and the classes that are defined in them."""
        seen: set[int] = set()
        for name, module in sys.modules.copy().items():
            content, place = _content(module), self._place(name)
            owner = place.owner
            if not content or id(content) in seen or owner == PROJECT:
                continue
            seen.add(id(content))
            self._pause()
            yield place, content
            classes = list(content.values())
            while classes:
                cls = classes.pop()
                if not issubclass(type(cls), type) or id(cls) in seen:
                    continue
                seen.add(id(cls))
                place = self._module_of(cls)
                if place.owner == owner:
                    members = _get(cls, "__dict__")
                    yield place._replace(name=_get(cls, "__qualname__")), members
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

    def _module_of(self, cls: type) -> _Place:
        return self._place(_text(_get(cls, "__module__")))

    def _origin(self, value: Any) -> _Place | None:
        """Return where code of the project is defined; None for any other value."""
        kind = type(value)
        if kind in _PLAIN:
            return None
        if kind is types.FunctionType:
            code = value.__code__
            file = code.co_filename
            if self._known.get(file) not in (None, PROJECT):  # nearly all
                return None
            module = _text(value.__globals__.get("__name__"))
            if file.startswith("<") and module not in sys.modules:
                return None  # generated by namedtuple, by attrs, from a template
            if self._owner("" if file.startswith("<") else file, module) != PROJECT:
                return None
            return _Place(PROJECT, file, module, code.co_qualname, code.co_firstlineno)
        cls = value if issubclass(kind, type) else kind if callable(value) else None
        if cls is None:
            return None
        place = self._module_of(cls)
        if place.owner == PROJECT or (cls is kind and place.module == "unittest.mock"):
            return place._replace(owner=PROJECT, name=_get(cls, "__qualname__"))
        return None


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
