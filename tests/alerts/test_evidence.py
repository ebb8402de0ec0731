"""What is kept of a bad operation: histograms, marked elements, and the first bad ones."""

from __future__ import annotations

import msgspec
import pytest
import torch

import tensortap as tap
from tensortap.alerts.alert import Alert, alert_of, record_of, verdict_of, verdicts_of
from tensortap.alerts.explanation import decode_explanation
from tensortap.errors import NotFound
from tensortap.record import Kind

INF = float("inf")


def explained(run):
    """Return the explanation of the first bad operation of a program."""
    with tap.ops() as ops:
        run()
    return ops.first_nonfinite.explanation


def marked(found):
    return {each.name: sum(each.marked) for each in found.operands}


def test_marks_what_a_broadcast_division_divided_by():
    x, y = torch.ones(3, 4), torch.tensor([1.0, 0.0, 2.0, 0.0])
    found = explained(lambda: x / y)
    assert marked(found) == {"self": 6, "other": 2, "output": 0}
    above, below, output = found.operands
    assert (below.low, below.high, below.count) == (0.0, 2.0, 4)
    assert (below.counts[0], below.marked[0]) == (2, 2)
    assert sum(above.counts) == 12
    assert (output.posinfs, output.is_output, sum(output.counts)) == (6, True, 6)
    assert found.bad == 6
    assert found.elements[0].index == (0, 1)
    assert found.elements[0].values == ("1", "0", "inf")


def test_marks_rows_and_columns_of_a_product():
    x, y = torch.ones(3, 2, dtype=torch.float16), torch.ones(2, 5, dtype=torch.float16)
    x[1], y[:, 4] = 60000, 3
    found = explained(lambda: x @ y)
    assert marked(found) == {"self": 2, "mat2": 10, "output": 0}  # all of row 1 overflows
    assert found.elements[0].values == ("", "", "inf")  # no element is at its place
    bias = torch.zeros(5, dtype=torch.float16)
    assert marked(explained(lambda: torch.addmm(bias, x, y)))["self"] == 5


def test_marks_masked_rows_of_a_softmax():
    x = torch.zeros(4, 3)
    x[2] = -INF
    found = explained(lambda: x.softmax(-1))
    assert (found.operands[0].neginfs, found.operands[1].nans) == (3, 3)
    assert found.elements[0].values == ("-inf", "nan")


def test_does_not_guess_what_a_sum_was_made_of():
    found = explained(lambda: torch.full((70000,), 3.0).half().sum())
    assert found.operation == "sum"
    assert found.operands[0].marked == ()
    assert found.bad == 1


def test_many_bad_elements_stay_small():
    found = explained(lambda: torch.zeros(1000, 1000).log())
    assert found.bad == 1_000_000
    assert len(found.elements) == 8
    assert len(msgspec.json.encode(found)) < 4000


def test_extreme_values_have_a_histogram():
    x = torch.tensor([-1.7e308, 0.0, 1.7e308], dtype=torch.float64)
    first, *_ = explained(lambda: x * 10).operands
    assert (sum(first.counts), sum(first.marked)) == (3, 2)
    assert (first.counts[0], first.counts[-1]) == (1, 1)


def test_alerts_keep_explanations():
    found = explained(lambda: torch.zeros(2).log())
    alert = Alert("why", "a", Kind.OP, 3, 0, "", "text", explanation=found)
    assert alert_of(record_of(alert, seq=0, time_ns=0)) == alert
    assert len(repr(alert)) < 400


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", '{"name": 1}', "\ud800", '{"bad": NaN}', '{"name":"' + "x" * 9000],
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
