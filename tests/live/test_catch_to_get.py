"""One program catches, another holds."""

from __future__ import annotations

from tensortap.api.lookup import get as fetch


def test_a_value_arrives_as_it_was_at_the_call(server, run):
    program = run("""
        import torch, tensortap as tap
        x = torch.arange(6.0).reshape(2, 3)
        ticket = tap.catch(x, "x")
        x.zero_()
        assert ticket.wait(60)
    """)
    program.end()
    assert fetch(server.history, "x").tolist() == [[0, 1, 2], [3, 4, 5]]
