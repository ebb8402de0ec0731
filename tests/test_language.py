"""The code reads as plain English, with one word for one idea."""

from __future__ import annotations

import ast
import collections
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tensortap"
MODULES = sorted(SOURCE.rglob("*.py"))
PROSE = sorted(
    [
        *MODULES,
        *SOURCE.rglob("*.[ch]"),
        *SOURCE.rglob("*.js"),
        *SOURCE.rglob("*.css"),
        *SOURCE.rglob("*.html"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*.md"),
    ]
)
# words that begin a noun phrase or a question, where an imperative verb belongs
NOT_VERBS = set(
    """a all an and any as at both by each every everything few for from half how if in its just
    last many more most no none nothing of on one only out several so some somebody such than that
    the their them there these they this those to two what whatever when where whether which who
    whoever whose why with without yes""".split()
)
BRITISH = re.compile(
    r"colour|behaviour|favour|neighbour|centre[ds]?\b|licence|catalogue|"
    r"\b\w+(?:alis|ilis|nis|ris|mis|tis)(?:e|ed|es|ing|ation)\b",
    re.IGNORECASE,
)
AMERICAN = re.compile(
    r"Optimiser_State|OPTIMISER_STATE|optimiser_state|[Oo]therwis|[Pp]recis|[Pp]romis|[Rr]ais|"
    r"[Aa]dvertis|[Ee]xercis|[Cc]ompromis|[Ss]urpris|[Rr]is|[Nn]ois|[Pp]ractis|premis|[Ee]nterpris|"
    r"[Cc]ris|[Pp]aradis|comprise|expertis|\bwise|likewise|elementwise|[Pp]ointwise"
)


@functools.cache
def definitions(path):
    """Return what a file defines: kind, name and docstring; properties describe an attribute."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            kind = "class" if isinstance(node, ast.ClassDef) else "module"
            found.append((kind, getattr(node, "name", ""), ast.get_docstring(node) or ""))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not any("property" in ast.unparse(each) for each in node.decorator_list):
                found.append(("function", node.name, ast.get_docstring(node) or ""))
    return found


def test_class_names_are_unique():
    places = collections.defaultdict(list)
    for path in MODULES:
        for kind, name, _ in definitions(path):
            if kind == "class":
                places[name].append(str(path.relative_to(SOURCE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("folder", sorted({path.relative_to(SOURCE).parts[0] for path in MODULES}))
def test_docstrings_start_with_a_verb(folder):
    paths = [path for path in MODULES if path.relative_to(SOURCE).parts[0] == folder]
    wrong = [
        f"{path.relative_to(SOURCE)}: {name}: {text.splitlines()[0]}"
        for path in paths
        for kind, name, text in definitions(path)
        if kind == "function"
        and re.match(r"[`\w]+", text)
        and re.match(r"`?(\w+)", text)[1].lower() in NOT_VERBS
    ]
    assert wrong == []


def test_modules_and_classes_are_not_described_by_a_question():
    questions = {"how", "what", "when", "where", "which", "who", "whose", "why"}
    wrong = [
        f"{path.relative_to(SOURCE)}: {text.splitlines()[0]}"
        for path in MODULES
        for kind, _, text in definitions(path)
        if kind != "function" and text and text.split()[0].lower() in questions
    ]
    assert wrong == []


def test_spelling_is_american():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {found[0]}"
        for path in PROSE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for found in BRITISH.finditer(line)
        if not AMERICAN.search(found[0])
    ]
    assert wrong == []
