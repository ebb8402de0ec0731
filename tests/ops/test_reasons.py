"""Why an operation made values that are not finite: each reason on a program that has it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import tensortap as tap
from tensortap.rooms.ops.operations import FORWARD, Operation, OperationInput, SourceLine
from tensortap.rooms.ops.reasons import why

INF, NAN = float("inf"), float("nan")


def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


HALF = torch.float16

FORWARDS = [
    (lambda: tensor(0, 1, 0, 0) / tensor(0, 1, 0, 0), "0/0: 3 elements of the denominator are 0"),
    (lambda: tensor(1, 2) / tensor(0, 1), "division by 0: 1 element of the denominator is 0"),
    (lambda: tensor(1, 0) / 0, "0/0: the denominator is 0"),
    (lambda: tensor(INF) / tensor(INF), "inf/inf: 1 element of both sides is infinite"),
    (lambda: tensor(1e30) / tensor(1e-20),
     ("division overflows float32: 1e+30 divided by numbers as small as 1e-20 exceeds the largest "
     "float32, 3.40282e+38")),
    (lambda: tensor(1, 14.2, dtype=HALF).exp(),
     "exp overflows float16 above 11.09: largest input 14.2"),
    (lambda: tensor(200.0).exp2(), "exp2 overflows float32 above 128.00: largest input 200"),
    (lambda: tensor(-1, 2, -3).log(), "log of 2 negative numbers"),
    (lambda: tensor(0, 2, 0).log(), "log of 0: 2 elements are 0"),
    (lambda: tensor(-1, 2).log1p(), "log1p of -1: 1 element is -1"),
    (lambda: tensor(-3, 2).log1p(), "log1p below -1: 1 element is below -1"),
    (lambda: tensor(-1, 4).sqrt(), "sqrt of 1 negative number"),
    (lambda: tensor(0, 4).rsqrt(), "rsqrt of 0: 1 element is 0"),
    (lambda: tensor(0.0, 2).reciprocal(), "reciprocal of 0: 1 element is 0"),
    (lambda: tensor(-2, 4) ** 0.3, "1 negative number to a power that is not whole"),
    (lambda: tensor(0, 4) ** -1.5, "0 to a negative power: 1 element is 0"),
    (lambda: tensor(300, 2, dtype=HALF) ** 3,
     "power overflows float16: 300 to the power of 3 exceeds the largest float16, 65,504"),
    (lambda: tensor(2.0).acos(), "acos outside [-1, 1]: 1 element is outside, 2 to 2"),
    (lambda: tensor(0.5, 1.0).atanh(), "atanh is infinite at -1 and 1: 1 element is there"),
    (lambda: tensor(300, dtype=HALF) * tensor(400, dtype=HALF),
     "product overflows float16: 300 times 400, the largest float16, 65,504"),
    (lambda: tensor(60000, dtype=HALF) + tensor(60000, dtype=HALF),
     "sum overflows float16: 6e+04 and 6e+04, the largest float16, 65,504"),
    (lambda: tensor(1.0, 70000, 80000).half(),
     "cast overflows float16: 2 values exceed 65,504, the largest is 80,000"),
    (lambda: torch.ones(65536, dtype=HALF).mul(2).sum(),
     "overflow in the sum of 65,536 float16: largest magnitude 2, the largest float16, 65,504"),
    (lambda: torch.full((2, 300), 20, dtype=HALF) @ torch.full((300, 2), 20, dtype=HALF),
     ("overflow in mm: sums of 300 products of numbers up to 20 and 20 exceed the largest float16, "
     "65,504")),
    (lambda: torch.empty(0).mean(), "0/0: the mean of no elements"),
    (lambda: tensor(1.0).std(), "0/0: the std of 1 element with a correction of 1"),
    (lambda: torch.tensor([[0.0, 1], [-INF, -INF]]).softmax(-1),
     "-inf minus -inf in softmax: row 1 is fully masked"),
    (lambda: functional.cross_entropy(torch.zeros(2, 3), torch.tensor([-100, -100])),
     "0/0: all 2 targets are ignored (-100)"),
    (lambda: torch.full((2,), -INF) - torch.full((2,), -INF),
     "inf minus inf: 2 elements of both sides are infinite"),
    (lambda: torch.full((2,), -INF) * 0,
     "inf * 0: 2 elements are infinite on one side and 0 on the other"),
    (lambda: tensor(NAN, 1, INF) + 1, "its input self already has 1 NaN and 1 Inf"),
    (lambda: functional.scaled_dot_product_attention(
        torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8),
        attn_mask=torch.tensor([[[[0.0, 0], [-INF, NAN]]]])),
     "its input attn_mask already has 1 NaN and 1 Inf"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize(("program", "expected"), FORWARDS, ids=[e[:40] for _, e in FORWARDS])
def test_forward(program, expected):
    with tap.ops() as ops:
        program()
    assert ops.first_nonfinite.why == expected


BACKWARDS = [
    (lambda: leaf(0.0, 4).sqrt(), "sqrt'(0) is infinite: 1 element is at that point"),
    (lambda: leaf(0.0, 4) ** 0.5, "pow'(0) is infinite: 1 element is at that point"),
    (lambda: leaf(1.0, 0.5).acos(), "acos'(±1) is infinite: 1 element is at that point"),
]


@pytest.mark.parametrize(("program", "expected"), BACKWARDS, ids=[e[:6] for _, e in BACKWARDS])
def test_backward(program, expected):
    with tap.ops() as ops:
        program().sum().backward()
    found = ops.first_nonfinite
    assert found.why == expected
    assert found.phase == "backward"


@pytest.mark.parametrize("name", ["norm", "std"])
def test_what_torch_itself_replaces_is_not_reported(name):
    with tap.ops() as ops:
        getattr(leaf(0.0, 0.0), name)().backward()
    assert ops.first_nonfinite is None
    reasons = {found.why for found in ops.nonfinite}
    assert f"{name}'(0) is infinite: 1 element is at that point" in reasons


def test_optimizer_without_eps():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], eps=0.0)
    weight.grad = torch.tensor([1.0, 0.0, 0.0])
    with tap.ops() as ops:
        optimizer.step()
    found = ops.first_nonfinite
    assert found.phase == "optimizer"
    assert found.why == "0/0: 2 elements of the denominator are 0"


def test_plain_facts_where_no_reason_is_known():
    with tap.ops() as ops:
        torch.lgamma(torch.tensor([-1.0, 2.0]))
    assert ops.first_nonfinite.why == "lgamma made 1 Inf of self -1 to 2"


def test_inputs_that_nobody_could_read():
    given = OperationInput("a", "float32", (2,), None, 0, lambda: None)
    operation = Operation("div", "", FORWARD, "", 0, 0, SourceLine(), [given], [], {})
    assert why(operation) == "div made values that are not finite of its inputs"
