"""Other ways to find the first difference, and to make films."""

from __future__ import annotations

import pathlib
import shutil
import time
from collections.abc import Callable

from bench.harness import Row, in_turns
from bench.peers import FIRST, FIRST_PART, disk, peer, values
from bench.runs import _no_server


def _first_difference(
    write: Callable[[object, pathlib.Path], object],
    first: Callable[[list[pathlib.Path], list[pathlib.Path]], int],
    how: str,
    name: str,
) -> list[Row]:
    """Compare the time to an answer, from files; `first` stops at the first difference."""
    import tensortap as tap
    from tensortap.rooms.compare.runs import compare_runs

    _no_server()
    count, culprit = 100, 80
    with disk() as folder:
        runs, files = [], []
        for side in range(2):
            runs.append(tap.init(folder / "runs"))
            files.append([folder / f"{side}-{number}" for number in range(count)])
            for number in range(count):
                x = values(1 << 20) + number
                if side and number >= culprit:
                    x[12345] += 1
                tap.catch(x, f"layers.{number}")
                write(x, files[-1][number])
            tap.finish()

        def ours() -> float:
            start = time.perf_counter()
            report = compare_runs(*runs)
            assert report.first is not None
            assert report.first.key.name == f"layers.{culprit}"
            return time.perf_counter() - start

        def theirs() -> float:
            start = time.perf_counter()
            assert first(*files) == culprit
            return time.perf_counter() - start

        a, b = in_turns(9, ours, theirs)
    note = f"tap.compare reports every difference, {how} the first"
    return [Row(f"{FIRST} ÷ {name}", None, True, a, b, note=note)]


@peer("numpy", FIRST)
def peers_allclose() -> list[Row]:
    import numpy as np

    def write(x, path: pathlib.Path) -> None:
        np.savez(path, value=x.numpy())

    def first(a: list[pathlib.Path], b: list[pathlib.Path]) -> int:
        pairs = zip(a, b, strict=True)
        sides = ([np.load(f"{path}.npz")["value"] for path in pair] for pair in pairs)
        return next(i for i, pair in enumerate(sides) if not np.allclose(*pair))

    return _first_difference(write, first, "numpy.allclose over savez files", "numpy.allclose")


@peer("torch", FIRST)
def peers_assert_close() -> list[Row]:
    import torch

    def differ(a, b) -> bool:
        try:
            torch.testing.assert_close(torch.load(a), torch.load(b))
        except AssertionError:
            return True
        return False

    def first(a: list[pathlib.Path], b: list[pathlib.Path]) -> int:
        return next(i for i, pair in enumerate(zip(a, b, strict=True)) if differ(*pair))

    how = "torch.testing.assert_close over torch.save files"
    return _first_difference(torch.save, first, how, "torch.testing.assert_close")


@peer("torch", FIRST_PART)
def peers_debug_mode_first() -> list[Row]:
    """Compare two steps of two models, one with a changed weight, from the first to the answer."""
    import torch
    from torch.utils._debug_mode import DebugMode

    import tensortap as tap
    from bench.gpt import Training
    from tensortap.rooms.compare.runs import compare_runs

    torch.set_num_threads(2)
    _no_server()
    trainings = [Training(), Training()]
    with torch.no_grad():
        trainings[1].model.blocks[3].mlp[0].weight[0, 0] += 1
    data = trainings[0].data[:, :-1]

    with disk() as folder:

        def ours() -> float:
            start = time.perf_counter()
            runs = []
            for each in trainings:
                runs.append(tap.init(folder))
                with (
                    tap.track(each.model, tensors=True, kind=("activation", "gradient")) as tracker,
                    torch.enable_grad(),
                ):
                    each.model(data)
                    tracker.step()
                tap.finish()
            first = compare_runs(*runs).first
            assert first is not None
            assert first.key.name.startswith("blocks.3.mlp.0"), first
            for run in runs:
                shutil.rmtree(run)
            return time.perf_counter() - start

        def theirs() -> float:
            start = time.perf_counter()
            logs = []
            for each in trainings:
                with DebugMode() as mode, DebugMode.log_tensor_hashes():
                    each.model(data)
                logs.append(mode.logs)
            assert DebugMode.check_hash_mismatches(*logs)
            return time.perf_counter() - start

        a, b = in_turns(5, ours, theirs)
    note = "tap.track(tensors=True) into two runs names the module; hashes of DebugMode in one "
    note += "process the operation"
    return [Row(f"{FIRST_PART} ÷ torch DebugMode", None, True, a, b, note=note)]


@peer("matplotlib", "film of 24 frames, 640×480, GIF")
def peers_matplotlib() -> list[Row]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import animation, pyplot

    import tensortap as tap
    from bench.films import _SIZE, _records, _tensors

    records, tensors = _records(), _tensors()
    with disk() as folder:
        numbers = iter(range(1 << 30))

        def ours() -> float:
            start = time.perf_counter()
            target = folder / str(next(numbers))
            with tap.Recorder(target, size=_SIZE, format="gif") as recorder:
                for record in records:
                    recorder(record)
            return time.perf_counter() - start

        def theirs() -> float:
            start = time.perf_counter()
            figure = pyplot.figure(figsize=(_SIZE[0] / 100, _SIZE[1] / 100), dpi=100)
            image = figure.add_subplot().imshow(tensors[0])
            figure.colorbar(image)
            film = animation.FuncAnimation(
                figure, lambda i: image.set_data(tensors[i]), frames=len(tensors)
            )
            film.save(folder / "theirs.gif", writer=animation.PillowWriter(20))
            pyplot.close(figure)
            return time.perf_counter() - start

        a, b = in_turns(3, ours, theirs)
    note = "tap.Recorder, matplotlib's FuncAnimation with imshow and PillowWriter"
    work = f"film of {len(tensors)} frames, {_SIZE[0]}×{_SIZE[1]}, GIF"
    return [Row(f"{work} ÷ matplotlib", None, True, a, b, note=note)]


ROWS = (peers_allclose, peers_assert_close, peers_debug_mode_first, peers_matplotlib)
