"""The contract of torch on one of its devices: see `tensortap.rooms.doctor.contract`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from tensortap.core.dtypes import DTYPES
from tensortap.rooms.doctor.contract import Contract


class TorchContract(Contract):
    """Tensors of torch."""

    framework = "torch"
    dtypes = tuple(row.name for row in DTYPES.values() if row.torch)

    @property
    def asynchronous(self) -> bool:  # type: ignore[override]
        return str(self.device).startswith("cuda")

    def tensor(self, array: NDArray[Any], dtype: str) -> torch.Tensor:
        data = bytearray(array.tobytes())
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
        tensor = flat.to(self.device).view(getattr(torch, DTYPES[dtype].torch))
        if self.device:
            tensor.to(self.device)  # raises for a dtype that the device lacks
        return tensor.view(array.shape)

    def contents(self, tensor: torch.Tensor) -> bytes:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        return bytes(flat.cpu().numpy().tobytes())

    def overwrite(self, tensor: torch.Tensor) -> None:
        tensor.view(-1).view(torch.uint8).zero_()

    def work(self, times: int) -> torch.Tensor:
        matrix = torch.full((512, 512), 1 / 512, device=self.device)
        for _ in range(times):
            matrix = matrix @ matrix
        return matrix

    @contextlib.contextmanager
    def observer(self, track: Callable[..., Any]) -> Iterator[Callable[[Any], object]]:
        layer = nn.Identity()
        with track(layer):
            yield layer

    def train(self, track: Callable[..., Any] | None) -> Iterator[bytes]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1),
                              nn.Linear(64, 8)).to(self.device)  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with track(model, optimizer) if track else contextlib.nullcontext() as tracker:
            for _ in range(10):
                loss = model(torch.randn(16, 64, device=self.device)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if tracker is not None:
                    tracker.step(loss=loss)
                yield b"".join(map(self.contents, model.state_dict().values()))
