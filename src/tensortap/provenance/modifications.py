"""Functions, methods and classes that were replaced after import, and by what.

Nothing is watched: the modules are walked as they are, so a patch is found whenever it was made.
What a module or class holds under a name is compared with what its source says:

1. *Walk* all loaded modules and the classes in them, through their plain dictionaries: nothing is
   imported, no lazy attribute wakes up. A function whose code lies in the file of its holder and
   bears the right name is what the source made, and that is nearly all of them.
2. *Ask the source* of the holder, for the rest, in a process of its own (`sources`): is the name
   bound there by a ``def``, a decorated ``def``, an assignment, an import, or not at all?
3. *Judge*. Code of the project in the place of a package's is always a modification. Between
   packages, and inside the project, it is one where the source has a plain ``def`` that is no
   longer there. What packages do to the standard library is their own business (torch replaces
   ``inspect.getfile`` on import), and so is what they generate for themselves.

The walk runs in slices of less than a millisecond (`pace`).
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tensortap.provenance import sources
from tensortap.provenance.pace import Pace
from tensortap.provenance.project import PROJECT, PYTHON, Owners, project_folder

# Straight from the type: subclasses may run code on attribute access, lazy modules do.
_module_dict: Callable[[types.ModuleType], dict[str, Any]]
_module_dict = vars(types.ModuleType)["__dict__"].__get__
_class_dict: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
_class_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_class_module: Callable[[type], Any] = type.__dict__["__module__"].__get__
_class_qualname: Callable[[type], str] = type.__dict__["__qualname__"].__get__

# Places that Python offers for replacement.
_HOOKS = frozenset(
    """sys.excepthook sys.displayhook sys.unraisablehook sys.breakpointhook threading.excepthook
    warnings.showwarning warnings.formatwarning warnings._showwarnmsg warnings._showwarnmsg_impl
    builtins._ builtins.display builtins.get_ipython builtins.exit builtins.quit
    logging._warnings_showwarning linecache.getlines linecache.checkcache pdb.set_trace""".split()
)
_OWN = "tensortap"
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A value that is not what one would expect under its name."""

    file: str  # of the holder; "" without source
    scope: str  # qualified name of the class, "" for a module
    name: str
    where: str  # "torch.nn.modules.linear.Linear.forward"
    holder: str  # whom the holder belongs to
    origin: str  # whom the value belongs to
    by: str  # "__main__.new_forward"
    module: str
    code_file: str
    code_line: int
    swapped: bool  # the function is the old one, its code is not
    inherited: str  # the base class that has the name too, "" if none
    callable_only: bool  # not a function or class, but an object that can be called
    plain_type: bool  # a class whose metaclass is type


@dataclass(frozen=True, slots=True)
class Modification:
    """A function, method or class that was replaced.

    ``kind`` is "replaced", "code" (the function is the old one, its ``__code__`` is not),
    "overrides" (a base class has it) or "added" (the project put it into a package).
    """

    where: str
    kind: str
    by: str
    module: str
    file: str
    line: int
    original: str

    def as_json(self) -> dict[str, Any]:
        """Everything but its name, which is the key that it is stored under."""
        return {
            "kind": self.kind,
            "by": self.by,
            "module": self.module,
            "file": self.file or None,
            "line": self.line or None,
            "original": self.original or None,
        }


def find(root: Path | None = None, *, pace: Pace | None = None) -> dict[str, Modification]:
    """All modifications there are now, by qualified name; for somebody who looks once.

    >>> find()
    {...}
    """
    return Finder(root, pace=pace or Pace(rest=0)).find()


class Finder:
    """Looks for modifications again and again, and asks for a source only once."""

    def __init__(
        self, root: Path | None = None, *, pace: Pace | None = None, timeout: float = 60.0
    ) -> None:
        self._owners = Owners(root or project_folder())
        self._timeout = timeout
        self._answers: dict[tuple[str, str, str, bool], dict[str, Any] | None] = {}
        self.pace = pace or Pace()
        self.problem = ""  # why the sources could not be asked

    def find(self) -> dict[str, Modification]:
        """All modifications there are now, by qualified name."""
        suspects = list(self._walk())
        self._ask(suspects)
        found = {}
        for suspect in suspects:
            self.pace()
            modification = self._judge(suspect)
            if modification is not None:
                found[suspect.where] = modification
        return dict(sorted(found.items()))

    # Walk

    def _walk(self) -> Iterator[Suspect]:
        seen: set[int] = set()
        for name in list(sys.modules):
            module = sys.modules.get(name)
            if not issubclass(type(module), types.ModuleType) or id(module) in seen:
                continue
            assert isinstance(module, types.ModuleType)
            seen.add(id(module))
            yield from self._walk_module(name, _module_dict(module), seen)

    def _walk_module(self, name: str, held: dict[str, Any], seen: set[int]) -> Iterator[Suspect]:
        file = _text(held.get("__file__"))
        holder = self._owners.of(file, name)
        place = _Place(file if file.endswith(".py") else "", "", name, holder)
        for key in list(held):
            self.pace()
            value = held.get(key)
            if type(key) is not str or value is None:
                continue
            if issubclass(type(value), type):
                if id(value) not in seen:
                    seen.add(id(value))
                    yield from self._walk_class(value, seen)
                suspect = self._class_in_module(value, key, place)
            else:
                suspect = self._examine(value, key, place)
            if suspect is not None:
                yield suspect

    def _walk_class(self, cls: type, seen: set[int]) -> Iterator[Suspect]:
        held = _class_dict(cls)
        module = _text(_class_module(cls))
        qualname = _class_qualname(cls)
        place = self._place_of(cls, module, qualname, held)
        for key in list(held):
            self.pace()
            value = held.get(key)
            if type(key) is not str or value is None:
                continue
            if issubclass(type(value), type):
                inner = f"{qualname}.{key}"
                if id(value) not in seen and _class_qualname(value) == inner:
                    seen.add(id(value))
                    yield from self._walk_class(value, seen)
                continue
            for part in _parts(value):
                suspect = self._examine(part, key, place, cls)
                if suspect is not None:
                    yield suspect
                    break

    def _place_of(self, cls: type, module: str, qualname: str, held: Mapping[str, Any]) -> _Place:
        """Where the source of a class lies: many lie about their module, their code does not."""
        votes: dict[str, int] = {}
        for key in list(held):
            value = held.get(key)
            if type(value) is types.FunctionType and value.__qualname__ == f"{qualname}.{key}":
                file = value.__code__.co_filename
                if value.__code__.co_name == key and not file.startswith("<"):
                    votes[file] = votes.get(file, 0) + 1
        self.pace()
        loaded = sys.modules.get(module)
        stated = ""
        if issubclass(type(loaded), types.ModuleType):
            assert isinstance(loaded, types.ModuleType)
            stated = _text(_module_dict(loaded).get("__file__"))
        # the stated file wins a draw: a class of one method, replaced by another file's
        file = max(votes, key=lambda f: (votes[f], f == stated)) if votes else stated
        if stated in votes:
            file = stated
        holder = self._owners.of(file, module)
        return _Place(file if file.endswith(".py") else "", qualname, module, holder)

    # Examine

    def _class_in_module(self, cls: type, key: str, place: _Place) -> Suspect | None:
        module = _text(_class_module(cls))
        if module == place.module and _class_qualname(cls) == key:
            return None
        loaded = sys.modules.get(module)
        file = ""
        if issubclass(type(loaded), types.ModuleType):
            assert isinstance(loaded, types.ModuleType)
            file = _text(_module_dict(loaded).get("__file__"))
        origin = self._owners.of(file, module)
        if origin == PYTHON:
            return None
        if origin != PROJECT != place.holder:
            # Between packages a class of the right name is an import, whatever module it claims.
            named = _class_qualname(cls).rpartition(".")[2] == key
            if named or origin == place.holder or place.holder == PYTHON:
                return None
        return self._suspect(
            key, place, origin, by=f"{module}.{_class_qualname(cls)}", module=module, file=file
        )

    def _examine(
        self, value: Any, key: str, place: _Place, cls: type | None = None
    ) -> Suspect | None:
        kind = type(value)
        if kind is types.MethodType:
            value = value.__func__
            kind = type(value)
        if kind is types.FunctionType:
            return self._function(value, key, place, cls)
        if kind in _HARMLESS or not _is_called(kind):
            return None
        return self._object(value, kind, key, place, cls)

    def _function(
        self, function: types.FunctionType, key: str, place: _Place, cls: type | None
    ) -> Suspect | None:
        code = function.__code__
        file = code.co_filename
        plain = _unmangled(key) if cls is not None else key
        expected = f"{place.scope}.{plain}" if place.scope else plain
        named = code.co_name in (key, plain)
        if named and file == place.file and function.__qualname__ == expected:
            # the name of the code cannot be borrowed with functools.wraps; Python 3.10 has none
            whole = getattr(code, "co_qualname", expected)
            wraps = place.holder == PROJECT and getattr(function, "__wrapped__", None) is not None
            if whole == expected and not wraps:
                return None
        module = _text(function.__globals__.get("__name__"))
        if file.startswith("<") and module not in sys.modules:
            return None  # generated: by namedtuple, by attrs, by a template
        origin = self._owners.of("" if file.startswith("<") else file, module)
        # Code that was typed in, in a function that keeps its name and its module.
        typed = file.startswith("<") and not named and function.__qualname__ == expected
        if typed and function.__name__ == key and module == place.module and place.file:
            origin = place.holder
        elif origin == place.holder != PROJECT or (origin == place.holder and file.startswith("<")):
            # its own code in another place: an alias, a decorator, generated
            if named or function.__name__ == key or "<" in function.__qualname__ or cls is not None:
                return None
        elif (origin == PYTHON and place.holder != PROJECT) or (
            place.holder == PYTHON and origin != PROJECT
        ):
            return None
        swapped = (
            function.__name__ == key
            and module == place.module
            and file != place.file
            and getattr(function, "__wrapped__", None) is None
        )
        if swapped:
            module = self._module_of(file) or module
        return self._suspect(
            key,
            place,
            origin,
            by=f"{module}.{getattr(code, 'co_qualname', code.co_name)}",
            module=module,
            file=file,
            line=code.co_firstlineno,
            swapped=swapped,
            cls=cls,
        )

    def _object(
        self, value: Any, kind: type, key: str, place: _Place, cls: type | None
    ) -> Suspect | None:
        module = _text(_class_module(kind))
        if issubclass(kind, (functools.partial, functools.partialmethod)):
            inner = value.func
            if type(inner) is not types.FunctionType:
                return None
            code = inner.__code__
            module = _text(inner.__globals__.get("__name__"))
            origin = self._owners.of(code.co_filename, module)
            by, file, line = f"{module}.{inner.__qualname__}", code.co_filename, code.co_firstlineno
        else:
            origin = self._owners.of_module(module)
            if module.startswith("unittest.mock") and place.module != module:
                origin = PROJECT  # nobody else puts mocks into modules
            by, file, line = f"{module}.{_class_qualname(kind)}", "", 0
        # Instances are at home everywhere; only the project's are looked at, and those in it.
        if origin != PROJECT and place.holder != PROJECT:
            return None
        return self._suspect(
            key, place, origin, by=by, module=module, file=file, line=line, cls=cls,
            callable_only=True,
        )  # fmt: skip

    def _suspect(
        self,
        key: str,
        place: _Place,
        origin: str,
        *,
        by: str,
        module: str,
        file: str,
        line: int = 0,
        swapped: bool = False,
        cls: type | None = None,
        callable_only: bool = False,
    ) -> Suspect | None:
        where = ".".join(part for part in (place.module, place.scope, key) if part)
        if origin == _OWN or where in _HOOKS:
            return None
        inherited = ""
        if cls is not None:
            if origin != PROJECT and self._made_by(cls, origin):
                return None
            for base in _class_mro(cls)[1:]:
                if key in _class_dict(base) and base is not object:
                    base_module = _text(_class_module(base))
                    inherited = f"{base_module}.{_class_qualname(base)}.{key}"
                    break
        return Suspect(
            place.file, place.scope, key, where, place.holder, origin, by, module, file, line,
            swapped, inherited, callable_only, type(cls) is type,
        )  # fmt: skip

    def _made_by(self, cls: type, owner: str) -> bool:
        """Whether a base class or the metaclass is of this owner: they may set what they like."""
        for base in (*_class_mro(cls)[1:], *_class_mro(type(cls))):
            module = _text(_class_module(base))
            if module.partition(".")[0] == owner:
                return True
        return False

    def _module_of(self, file: str) -> str:
        for name in list(sys.modules):
            module = sys.modules.get(name)
            if issubclass(type(module), types.ModuleType):
                assert isinstance(module, types.ModuleType)
                if _module_dict(module).get("__file__") == file:
                    return name
        return ""

    # Ask the source

    def _ask(self, suspects: list[Suspect]) -> None:
        """Have the sources of new suspects read, in a process of its own."""
        questions = []
        for suspect in suspects:
            question = _question(suspect)
            if suspect.file and question not in self._answers:
                self._answers[question] = None
                questions.append(question)
        if not questions:
            return
        try:
            if not re.match(r"python|pypy", os.path.basename(sys.executable or "")):
                # Python inside another program, which must not be started twice
                raise OSError(f"{sys.executable!r} is no Python")
            # -S, -I: no site, no paths of the user, no variables: only the standard library
            done = subprocess.run(
                [sys.executable, "-S", "-I", os.path.abspath(sources.__file__)],
                input=self._lines(questions),
                capture_output=True,
                text=True,
                encoding="utf-8",
                timeout=self._timeout,
                check=True,
                start_new_session=True,  # Ctrl-C is for the training program
            )
            answers = [json.loads(line) for line in self._paced(done.stdout.splitlines())]
            if len(answers) != len(questions):
                raise ValueError(f"{len(answers)} answers to {len(questions)} questions")
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self.problem = f"the sources could not be read: {error}"
            for question in questions:
                del self._answers[question]  # next time, perhaps
            return
        finally:
            self.pace.resume()
        self.problem = ""
        for question, answer in zip(questions, answers, strict=True):
            self._answers[question] = answer

    def _lines(self, questions: list[tuple[str, str, str, bool]]) -> str:
        return "".join(f"{json.dumps(question)}\n" for question in self._paced(questions))

    def _paced(self, items: list[_Item]) -> Iterator[_Item]:
        for item in items:
            self.pace()
            yield item

    # Judge

    def _judge(self, suspect: Suspect) -> Modification | None:
        answer = self._answers.get(_question(suspect))
        if answer is None:
            kind, original = self._without_source(suspect)
        else:
            kind, original = self._with_source(suspect, answer)
        if not kind:
            return None
        if suspect.swapped and kind == "replaced":
            kind = "code"
        return Modification(
            suspect.where, kind, suspect.by, suspect.module, suspect.code_file,
            suspect.code_line, original,
        )  # fmt: skip

    def _without_source(self, suspect: Suspect) -> tuple[str, str]:
        """A holder written in C, or typed in: only the project's code is out of place there."""
        if suspect.origin != PROJECT or suspect.holder == PROJECT:
            return "", ""
        if suspect.inherited:
            return "overrides", suspect.inherited
        return "replaced", ""

    def _with_source(self, suspect: Suspect, answer: dict[str, Any]) -> tuple[str, str]:
        defs: list[tuple[int, int, bool]] = answer["defs"]
        if suspect.code_file == suspect.file and any(d[0] == suspect.code_line for d in defs):
            return "", ""  # it is what the source made, under another qualified name
        original = f"{suspect.file}:{defs[-1][0]}" if defs else ""
        foreign = suspect.holder not in (PROJECT, suspect.origin)
        if suspect.origin == PROJECT and foreign:
            if defs or answer["other"] or answer["star"]:
                return "replaced", original
            return ("overrides", suspect.inherited) if suspect.inherited else ("added", "")
        if defs and not answer["other"]:
            if answer["decorated"] or any(decorated for _, _, decorated in defs):
                return "", ""  # a decorator may return anything
            if suspect.holder != PROJECT and answer["assigned"]:
                return "", ""  # the file patches itself
            return "replaced", original
        if suspect.holder == PROJECT == suspect.origin:
            return self._inside_project(suspect, answer)
        return "", ""

    def _inside_project(self, suspect: Suspect, answer: dict[str, Any]) -> tuple[str, str]:
        packages = answer["imports"]
        if packages and not answer["defs"] and "" not in packages:
            # imported from elsewhere, says the source, but it is the project's own
            if not any(self._is_of_project(package) for package in packages):
                return "replaced", f"imported from {', '.join(packages)}"
        bound = answer["defs"] or answer["other"]
        made = answer["decorated"] or not suspect.plain_type or suspect.code_file.startswith("<")
        if suspect.inherited and not bound and not made and not suspect.callable_only:
            return "overrides", suspect.inherited
        return "", ""

    def _is_of_project(self, package: str) -> bool:
        loaded = sys.modules.get(package)
        if not issubclass(type(loaded), types.ModuleType):
            return True  # cannot tell
        assert isinstance(loaded, types.ModuleType)
        held = _module_dict(loaded)
        file = _text(held.get("__file__"))
        if not file:  # a namespace package; its parts may be anybody's
            return package not in sys.stdlib_module_names
        return self._owners.of(file, package) == PROJECT


@dataclass(frozen=True, slots=True)
class _Place:
    """A module or class that holds names."""

    file: str
    scope: str
    module: str
    holder: str


_HARMLESS = frozenset(
    {
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.MethodWrapperType,
        types.ClassMethodDescriptorType,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
        types.ModuleType,
        types.GenericAlias,
        str, int, float, bool, bytes, tuple, list, dict, set, frozenset, object,
    }
)  # fmt: skip


def _question(suspect: Suspect) -> tuple[str, str, str, bool]:
    """What `sources` is asked: between packages, nothing but a def is of interest."""
    return suspect.file, suspect.scope, suspect.name, PROJECT in (suspect.holder, suspect.origin)


def _parts(value: Any) -> tuple[Any, ...]:
    """The functions inside a descriptor."""
    kind = type(value)
    if kind is staticmethod or kind is classmethod:
        return (value.__func__,)
    if kind is property:
        return tuple(f for f in (value.fget, value.fset, value.fdel) if f is not None)
    if kind is functools.cached_property:
        return (value.func,)
    return (value,)


def _is_called(kind: type) -> bool:
    """Whether instances of a class can be called; asks the class, not the instance."""
    if issubclass(kind, functools.partialmethod):
        return True
    return any("__call__" in _class_dict(base) for base in _class_mro(kind))


def _unmangled(name: str) -> str:
    """``__name`` of ``_Class__name``, as its code is called."""
    at = name.find("__", 1)
    return name[at:] if name.startswith("_") and at > 0 and not name.endswith("__") else name


def _text(value: Any) -> str:
    return value if type(value) is str else ""
