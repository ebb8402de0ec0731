"""Files beside runs, and statistics of one tensor."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from bench.harness import Row, in_turns, time_of
from bench.peers import CALL, SIZES, STORED, TIMES, calls, disk, peer, rates, values
from bench.runs import _no_server


def _stored(write: Callable[[object, pathlib.Path], object], how: str, name: str) -> list[Row]:
    """Compare a run with a function that writes one tensor to a new file."""
    import tensortap as tap

    _no_server()
    with disk() as folder:
        tap.init(folder)
        count = iter(range(1 << 40))

        def catch(x, name: str) -> None:
            x[0] = next(count)  # a tensor that has not changed would be stored once
            tap.catch(x, name)

        def theirs(x, _: str = "") -> None:
            x[0] = next(count)
            write(x, folder / "one")

        def all_of_ours(x) -> None:
            for _ in range(TIMES):
                catch(x, "value")
            assert tap.flush(60)

        def all_of_theirs(x) -> None:
            for number in range(TIMES):
                write(x, folder / f"{number}")

        how = f"tap.catch into a run, {how}"
        rows = calls(catch, lambda: tap.flush(60), theirs, lambda: None, how, name)
        rows += rates(STORED, all_of_ours, all_of_theirs, name)
        assert not tap.receipt().dropped
        tap.finish()
    return rows


_STORED = CALL.format("1, 16 MiB"), STORED.format("1, 16 MiB")


@peer("torch", *_STORED)
def peers_torch_save() -> list[Row]:
    import torch

    return _stored(torch.save, "torch.save to one file each", "torch.save")


@peer("h5py", *_STORED)
def peers_h5py() -> list[Row]:
    import h5py

    def write(x, path: pathlib.Path) -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("value", data=x.numpy())

    return _stored(write, "create_dataset in one file each", "h5py")


@peer("safetensors", *_STORED)
def peers_safetensors() -> list[Row]:
    from safetensors.torch import save_file

    def write(x, path: pathlib.Path) -> None:
        save_file({"value": x}, path)

    return _stored(write, "save_file to one file each", "safetensors")


@peer("numpy", *_STORED)
def peers_savez() -> list[Row]:
    import numpy as np

    def write(x, path: pathlib.Path) -> None:
        np.savez(path, value=x.numpy())

    return _stored(write, "numpy.savez to one file each", "numpy.savez")


def _statistics(theirs: Callable[[object], object], how: str, name: str) -> list[Row]:
    from tensortap.text.tensors import line
    from tensortap.values.torch.summarize import summarize

    def ours(x) -> str:
        return line(summarize(x), "float32", tuple(x.shape))

    rows = []
    for size, nbytes in SIZES.items():
        x = values(nbytes) - 0.5
        a, b = in_turns(
            11, lambda x=x: time_of(lambda: ours(x)), lambda x=x: time_of(lambda: theirs(x))
        )
        work = f"statistics of a tensor, {size}"
        rows.append(Row(f"{work} ÷ {name}", None, True, a, b, note=f"one line of text, {how}"))
    return rows


@peer("lovely-tensors", "statistics of a tensor, 1, 16 MiB")
def peers_lovely() -> list[Row]:
    import lovely_tensors

    return _statistics(lambda x: str(lovely_tensors.lovely(x)), "str(lovely(x))", "lovely-tensors")


@peer("torch", "statistics of a tensor, 1, 16 MiB")
def peers_torch_chain() -> list[Row]:
    from bench.stats import naive

    how = "mean, std, extremes, three norms and exponents, one torch operation each"
    return _statistics(naive, how, "torch")


ROWS = (
    peers_torch_save, peers_h5py, peers_safetensors, peers_savez, peers_lovely, peers_torch_chain,
)  # fmt: skip
