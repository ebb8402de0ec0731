"""Snapshots do not disturb torch, in any mode or context."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tensortap.core.buffers import Pool
from tensortap.values import describe, nbytes_of, rebuild, snapshot

POOL = Pool()


class TestContexts:
    """Modes and contexts of the training."""

    tensors = (torch.randn(()), torch.randn(5, 6), torch.randn(5, 6).T, torch.randn(300, 200).T)

    @pytest.mark.parametrize(
        "context",
        [
            torch.no_grad,
            torch.enable_grad,
            torch.inference_mode,
            lambda: torch.autocast("cpu", torch.bfloat16),
            lambda: torch.device("meta"),
            torch.autograd.detect_anomaly,
            lambda: torch.autograd.graph.saved_tensors_hooks(print, print),
        ],
    )
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

    def test_modes_do_not_see_snapshots(self):
        seen = []

        class Functions(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        class Dispatches(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        with Functions(), Dispatches():
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


def train(catch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(inplace=True), torch.nn.Dropout(0.3),
        torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 4),
    )  # fmt: skip
    caught = []

    def hook(module, args, output):
        caught.append((output.detach().clone(), catch(output)))

    def on_gradient(parameter):
        catch(parameter.grad.T)

    for layer in model:
        layer.register_forward_hook(hook)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(on_gradient)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        catch(dict(model.named_parameters()))
        losses.append(loss.item())
    return losses, model.state_dict(), torch.get_rng_state(), caught


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_training_is_bit_identical():
    train(lambda value: None)  # warm up: the first training of a process may round differently
    losses, state, random, _ = train(lambda value: None)
    losses2, state2, random2, caught = train(lambda value: snapshot(value, POOL)[0])
    assert losses == losses2
    assert torch.equal(random, random2)
    assert all(torch.equal(state[name], state2[name]) for name in state)
    assert len(caught) == 20 * 6
    assert all(torch.equal(expected, rebuild(node)) for expected, node in caught)
