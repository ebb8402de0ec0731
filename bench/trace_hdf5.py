"""Row on HDF5: tensors of 64 KiB into one growing dataset, against bare h5py."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
import time

from bench.harness import Row, in_turns

_COUNT = 1000


def hdf5() -> list[Row]:
    """Write one tensor per call; ours flushes by default, h5py only at the end."""
    import h5py
    import torch

    import tensortap as tap

    folder = pathlib.Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    tensors = [torch.randn(128, 128) for _ in range(16)]

    def ours() -> float:
        (folder / "ours.h5").unlink(missing_ok=True)
        start = time.perf_counter()
        saver = tap.HDF5(folder / "ours.h5")
        for i in range(_COUNT):
            saver("forward.x", [tensors[i % 16]], [i], [0])
        saver.close()
        return time.perf_counter() - start

    def base() -> float:
        (folder / "base.h5").unlink(missing_ok=True)
        start = time.perf_counter()
        with h5py.File(folder / "base.h5", "w") as file:
            data = file.create_dataset(
                "x", shape=(0, 128, 128), maxshape=(None, None, None), dtype="f4",
                chunks=(1, 128, 128),
            )  # fmt: skip
            for i in range(_COUNT):
                data.resize(i + 1, axis=0)
                data[i] = tensors[i % 16].numpy()
        return time.perf_counter() - start

    try:
        a, b = in_turns(7, ours, base)
        with h5py.File(folder / "ours.h5") as x, h5py.File(folder / "base.h5") as y:
            assert x["forward.x/values"].shape == y["x"].shape
            assert (x["forward.x/values"][-1] == y["x"][-1]).all()
    finally:
        shutil.rmtree(folder)
    note = f"with iterations and ranks, whole after a kill; {_COUNT * 64 / 1024 / min(b):.0f} MB/s"
    return [Row("1,000 tensors of 64 KiB to HDF5 ÷ bare h5py", 1.3, True, a, b, note=note)]


ROWS = [hdf5]
