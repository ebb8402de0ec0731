"""Explanations of bad operations: what is kept of them, and which verdict an alert has."""

from __future__ import annotations

import msgspec
import pytest
import torch

import tensortap as tap
from tensortap.alerts.alert import Alert, alert_of, record_of
from tensortap.core.errors import NotFound
from tensortap.core.record import Kind
from tensortap.rooms.ops.explanation import decode_explanation
from tensortap.rooms.ops.verdicts import verdict_of, verdicts_of


def explained(run):
    """Return the explanation of the first bad operation of a program."""
    with tap.ops() as ops:
        run()
    return ops.first_nonfinite.explanation


def test_values_of_what_was_read_and_made():
    x = torch.ones(4, 3, dtype=torch.float16)
    x[2] = 60000
    found = explained(lambda: x * torch.full((3,), 2.0).half())
    assert [(each.name, each.values) for each in found.operands] == [
        ("self", "[4, 3] f16 x∈[1 60000] μ=15001 σ=27136"),
        ("other", "[3] f16 all 2"),
        ("output", "[4, 3] f16 x=2 +Inf 3!"),
    ]


def test_of_lists_the_bad_one_is_shown():
    good, bad = torch.ones(2), torch.zeros(2)
    found = explained(lambda: torch._foreach_log([good, bad]))
    assert [each.name for each in found.operands] == ["self[1]", "output[1]"]


def test_alerts_keep_explanations():
    found = explained(lambda: torch.zeros(2).log())
    alert = Alert("why", "a", Kind.OP, 3, 0, "", "text", explanation=found)
    assert alert_of(record_of(alert, seq=0, time_ns=0)) == alert
    assert len(repr(alert)) < 400


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", '{"name": 1}', "\ud800", '{"line": NaN}', '{"name":"' + "x" * 9000],
)
def test_malformed_explanations_are_left_out(text):
    assert decode_explanation(text) is None


def test_oversized_explanations_are_left_out():
    found = explained(lambda: torch.zeros(2).log())
    assert decode_explanation(msgspec.json.encode(found).decode()) == found
    large = msgspec.json.encode(msgspec.structs.replace(found, source=("x",) * 33)).decode()
    assert decode_explanation(large) is None


def test_the_newest_verdict_is_chosen():
    found = explained(lambda: torch.zeros(2).log())
    given = [
        Alert("nan", "a", Kind.OP, 9, 0, "", ""),
        Alert("why", "b", Kind.OP, 2, 0, "", ""),
        Alert("why", "c", Kind.OP, 3, 0, "", "", explanation=found),
        Alert("why", "d", Kind.OP, 3, 1, "", ""),
    ]
    assert verdict_of(given).name == "c"
    assert verdict_of(given, step=2).name == "b"
    assert verdict_of(given, rank=1).name == "d"
    assert verdict_of(given[:1]) is None
    with pytest.raises(NotFound, match="verdicts are of steps 2, 3"):
        verdict_of(given, step=9)


def test_alerts_find_their_verdict():
    """By step, rank and module: several verdicts of a step are not mixed up."""
    own = explained(lambda: torch.zeros(2).log())

    def why(name, rank, module, explanation=None, message=""):
        message = message or name
        return Alert("why", name, Kind.OP, 3, rank, module, message, explanation=explanation)

    attention, head = why("attn:2:softmax", 0, "attn", own), why("head:0:mm", 0, "head", own)
    silent, loud = why("blackbox", 1, "", message="x"), why("mlp:1:exp", 2, "mlp", own, "x")
    find = verdicts_of([attention, head, silent, loud])

    def nan(name, step=3, rank=0, rule="nan", origin=""):
        return Alert(rule, name, Kind.ACTIVATION, step, rank, name, "", origin)

    assert find(nan("head")) is head
    assert find(nan("out", origin="attn")) is attention
    assert find(nan("out", rank=1)) is loud  # the box of rank 1 says that it began on rank 2
    assert find(silent) is silent
    assert find(nan("out", rank=3)) is None
    assert find(nan("head", step=4)) is None
    assert find(nan("head", rule="dead")) is None
