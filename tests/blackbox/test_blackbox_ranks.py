"""The black box in distributed jobs: in step on all ranks, and the verdict names the rank."""

from __future__ import annotations

import pytest

_PROGRAM = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def build(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def run(kind, fault, boxed):
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    inner = getattr(model, "module", model)
    inner.calls = 0  # kept by the box, as it belongs to a module
    once = [1]

    def train(x):
        optimizer.zero_grad()
        inner.calls += 1
        h = model(x)
        if rank == 1 and inner.calls == 6 and fault == "transient" and once:
            h = h * float(once.pop() and "nan")
        if rank == 1 and inner.calls > 5 and fault == "deterministic":
            h = torch.log(-h.abs() - 1)
        loss = h.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = tap.blackbox(train, model, optimizer, every=3) if boxed else train
    for number in range(7):
        x = torch.randn(4, 4, generator=generator)
        if rank == 1 and number == 5 and fault == "data":
            x[2] = float("nan")
        step(x)
    tensors = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return [x.detach().numpy().tobytes() for x in tensors], step

result = []
for kind in ("ddp", "fsdp2"):
    for fault in ("data", "transient", "deterministic"):
        plain, _ = run(kind, fault, False)
        content, box = run(kind, fault, True)
        verdict = box.verdicts[0]
        operation = verdict.finding.operation if verdict.finding is not None else ""
        result.append([fault, verdict.kind, verdict.step, verdict.rank, verdict.rows, operation,
                       content == plain, verdict.text])
"""


@pytest.mark.slow
def test_verdicts_of_ranks(gloo):
    for rank, found in enumerate(gloo(_PROGRAM, 2)):
        assert len(found) == 6
        for fault, kind, step, culprit, rows, operation, same, text in found:
            assert (kind, step) == (fault, 5), text
            assert same, text
            if fault != "transient":
                assert culprit == 1
                assert "step 5 on rank 1" in text
            assert rows == ([2] if fault == "data" else [])
            if fault == "deterministic" and rank == 1:
                assert operation == "log"
