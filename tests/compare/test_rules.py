"""Rules: the file, and their effect."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tensortap.core.errors import NotFound, TensortapError
from tensortap.rooms.compare.rules import load_rules, parse_rules
from tensortap.rooms.compare.runs import compare_runs


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[[rule]\nnames = 1", "line 1, column"),
        ('[[rule]]\nnames = "("', "rule 1: .*not a regular expression"),
        (
            '[[rule]]\nnames = "a"\n\n[[rule]]\n  nmes = "b"',
            "rule 2: .*unknown field `nmes`; options are names",
        ),
        ('[[rule]]\nkinds = ["Activations"]', "rule 1: unknown kind 'Activations'"),
        ("[[rule]]\natol = -1", "rule 1: atol must be a number of at least 0"),
        ("[[rule]]\nrtol = 'x'", "rule 1: "),
        ("[[rule]]\nkinds = [{a = 1}]", r"rule 1: .*got `object` - at `\$.kinds"),
        ("[[rule]]\nkinds = 1", r"rule 1: .*at `\$.kinds"),
        ("[[rule]]\natol = true", r"rule 1: .*at `\$.atol"),
        ('[[rule]]\nignore = "no"', r"rule 1: .*at `\$.ignore"),
        ("rule = [1]", "rule 1: Expected `object`"),
        ("a = " + "[" * 3000, "recursion"),
        (f"a = {'9' * 5000}", "digits"),
        (f"[[rule]]\natol = 0x{'f' * 5000}", "rule 1: "),
        ('[[rule]]\nnames = "a{99999999999}"', "rule 1: .*not a regular expression"),
        (f'[[rule]]\nnames = "{"(" * 20_000}"', "rule 1: .*not a regular expression"),
        ('[[rule]]\n"\\u001b[2J" = 1', "rule 1: .*unknown field `\N{REPLACEMENT CHARACTER}"),
        ("[other]\n", "only \\[\\[rule\\]\\] tables"),
    ],
)
def test_file_errors_name_the_rule(text, where):
    with pytest.raises(TensortapError, match=where):
        parse_rules(text)


def test_no_such_file(tmp_path):
    with pytest.raises(NotFound):
        load_rules(tmp_path / "rules.toml")


def test_neither_pipes_nor_binary_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    (tmp_path / "long").write_text("a" + ".a" * 500_000 + " = 1")  # takes tomllib minutes
    said = {"pipe": "not a regular file", "binary": "not a text", "long": "more than 64 KiB"}
    for name, what in said.items():
        with pytest.raises(TensortapError, match=what):
            load_rules(tmp_path / name)


def test_rules_override_the_tolerance(write, tmp_path):
    x = np.arange(5000, dtype="f4") + 1
    one = write([(n, "Value", 0, x) for n in ("a", "b", "c")])
    two = write([(n, "Value", 0, x * np.float32(1.001)) for n in ("a", "b", "c")])
    path = tmp_path / "rules.toml"
    path.write_text("""
        [[rule]]
        names = "^a$"
        rtol = 1e-2

        [[rule]]
        names = "^b$"
        kinds = ["Value"]
        atol = 10

        [[rule]]
        names = "^c$"
        ignore = true
    """)
    report = compare_runs(one, two, rules=path)
    assert report, str(report)
    assert report.ignored == 1
    assert report.first is None
    assert len(compare_runs(one, two).differences) == 3


def test_first_matching_rule_applies():
    book = parse_rules('[[rule]]\nnames="x"\natol=1\n[[rule]]\nnames="."\natol=2')
    assert book.find("x", "Value").atol == 1
    assert book.find("y", "Value").atol == 2
    assert parse_rules("").find("x", "Value").atol is None
    kinds = parse_rules('[[rule]]\nkinds=["Gradient"]\natol=1')
    assert kinds.find("x", "Value").atol is None
    assert kinds.find("x", "Gradient").atol == 1
