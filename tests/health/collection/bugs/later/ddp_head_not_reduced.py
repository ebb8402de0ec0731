import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def main(rank, world, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(9, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
    head = nn.Linear(24, 3)
    model = nn.Sequential(encoder, head)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    torch.manual_seed(10 + rank)
    for step in range(40):
        x = torch.randn(24, 9)
        y = x[:, :3].argmax(1)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in encoder.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, args=(2, f"{folder}/store"), nprocs=2)
