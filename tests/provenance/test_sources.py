"""What a source binds a name to."""

import textwrap

import pytest

from tensortap.provenance.sources import answer

SOURCE = '''
    from torch.nn.functional import relu, gelu as g
    import numpy as np, os.path
    from . import near
    def plain(): pass
    @decorate
    def decorated(): pass
    def twice(): pass
    twice = wrap(twice)
    if True:
        def conditional(): pass
    else:
        conditional = None
    try:
        from fast import quick
    except ImportError:
        def quick(): pass
    def uses():
        global made
        made = 1
        class Local:
            def method(self): pass
    class Net:
        def forward(self): pass
        alias = forward
        def __hidden(self): pass
        class Inner:
            def f(self): pass
        with x as y:
            def within(self): pass
    @dataclass
    class Data:
        x: int = 1
    Net.assigned = 3
    setattr(Dynamic, "x", 1)
    class Dynamic:
        def x(self): pass
    text = """
    def in_a_string(): pass
    """
'''


@pytest.fixture
def ask(tmp_path):
    file = tmp_path / "source.py"
    file.write_text(textwrap.dedent(SOURCE))

    def ask(scope, name, everything=True):
        return answer([(str(file), scope, name, everything)])[0]

    return ask


def test_plain_and_decorated_functions(ask):
    assert ask("", "plain")["defs"] == [[5, 5, False]]
    assert ask("", "decorated")["defs"] == [[6, 7, True]]
    assert not ask("", "plain")["other"]


def test_names_that_are_bound_in_other_ways_too(ask):
    for name in ("twice", "conditional", "quick"):
        assert ask("", name)["defs"], name
        assert ask("", name)["other"], name
    assert ask("", "made")["other"]
    for name, package in (("relu", "torch"), ("g", "torch"), ("np", "numpy")):
        assert package in ask("", name)["imports"]
        assert not ask("", name)["defs"]
    assert ask("", "near")["imports"] == [""]


def test_classes(ask):
    assert ask("Net", "forward")["defs"]
    assert ask("Net", "alias")["other"]
    assert ask("Net", "_Net__hidden")["defs"]
    assert ask("Net.Inner", "f")["defs"]
    assert ask("Net", "within")["defs"]
    assert ask("uses.<locals>.Local", "method")["defs"]
    assert ask("Net", "assigned")["assigned"]
    assert not ask("Net", "forward")["assigned"]
    assert ask("Dynamic", "x")["assigned"]
    assert ask("Data", "__init__") == {
        "defs": [], "other": False, "imports": [], "star": False, "assigned": False,
        "decorated": True,
    }  # fmt: skip


def test_nothing_there(ask):
    assert ask("Nowhere", "x") is None
    assert ask("", "in_a_string")["defs"] == []
    assert ask("", "relu", everything=False) is None
    assert ask("", "plain", everything=False)["defs"]
    assert ask("Net", "_Net__hidden", everything=False)["defs"]


@pytest.mark.parametrize("content", [b"def (", b"\xff\xfe\x00", b"# coding: nonsense\n", b""])
def test_files_that_are_no_python(tmp_path, content):
    file = tmp_path / "bad.py"
    file.write_bytes(content)
    assert answer([(str(file), "Net", "x", True)]) == [None]
    assert answer([(str(tmp_path / "none.py"), "", "x", True)]) == [None]
