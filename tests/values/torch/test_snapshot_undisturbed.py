"""Snapshots do not disturb torch, in any mode or context."""

import pytest
import torch

from tensortap.core.buffers import Pool
from tensortap.values import describe, nbytes_of, rebuild, snapshot

POOL = Pool()


class TestContexts:
    """Modes and contexts of the training."""

    tensors = (torch.randn(()), torch.randn(5, 6), torch.randn(5, 6).T, torch.randn(300, 200).T)

    @pytest.mark.parametrize(
        "context",
        [
            torch.no_grad, torch.enable_grad, torch.inference_mode,
            lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("meta"),
            torch.autograd.detect_anomaly,
            lambda: torch.autograd.graph.saved_tensors_hooks(print, print),
        ],
    )  # fmt: skip
    @pytest.mark.filterwarnings("ignore:Anomaly")
    def test_contexts(self, context):
        with context():
            nodes = [snapshot(tensor, POOL)[0] for tensor in self.tensors]
            backs = [rebuild(node) for node in nodes]
            inference = snapshot(torch.ones(3, device="cpu"), POOL)[0]
        for tensor, back in zip(self.tensors, backs, strict=True):
            assert torch.equal(tensor, back)
            assert back.device.type == "cpu"
            assert not back.is_inference()
        assert rebuild(inference).tolist() == [1, 1, 1]

    def test_inference_tensors(self):
        with torch.inference_mode():
            tensor = torch.randn(4, 5)
        assert torch.equal(rebuild(snapshot(tensor, POOL)[0]), tensor)
        assert torch.equal(rebuild(snapshot(tensor.T, POOL)[0]), tensor.T)

    def test_deterministic_mode(self):
        torch.use_deterministic_algorithms(True)
        try:
            for tensor in self.tensors:
                assert torch.equal(rebuild(snapshot(tensor, POOL)[0]), tensor)
        finally:
            torch.use_deterministic_algorithms(False)

    def test_modes_do_not_see_snapshots(self, modes):
        with modes() as seen:
            nodes = [snapshot(tensor, POOL)[0] for tensor in self.tensors]
            described = [describe(tensor) for tensor in self.tensors]
            sizes = [nbytes_of(tensor) for tensor in self.tensors]
            assert not seen
        assert [d[2] for d in described] == [tuple(t.shape) for t in self.tensors]
        assert sizes == [t.nbytes for t in self.tensors]
        for tensor, node in zip(self.tensors, nodes, strict=True):
            assert torch.equal(rebuild(node), tensor)


def test_tensors_stay_as_they_are():
    tensor = torch.randn(20, 30, requires_grad=True)
    result = (tensor * 2).T
    state, version = torch.get_rng_state(), result._version
    before = result.grad_fn, torch.is_grad_enabled()
    snapshot(result, POOL)
    snapshot(tensor, POOL)
    assert (result.grad_fn, torch.is_grad_enabled()) == before
    assert result._version == version
    assert torch.equal(torch.get_rng_state(), state)
    result.sum().backward()
    assert torch.equal(tensor.grad, torch.full((20, 30), 2.0))
