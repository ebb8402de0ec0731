"""Dashboards and modes that watch a whole model beside `tap.track`."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable

from bench.harness import Row, in_turns, time_of
from bench.peers import CALL, STEP, calls, disk, peer
from bench.runs import _no_server


def _histograms(log: Callable[[object, str], object], how: str, name: str) -> list[Row]:
    """Compare a run that keeps the whole tensor with a dashboard that gets a histogram."""
    import tensortap as tap

    _no_server()
    with disk() as folder:
        tap.init(folder)
        how = f"tap.catch into a run, {how}"
        rows = calls(tap.catch, lambda: tap.flush(60), log, lambda: None, how, name)
        tap.finish()
    return rows


def _steps(
    start: Callable[[object], Callable[[float], object]], how: str, name: str, rounds: int = 3
) -> list[Row]:
    """Compare a step that tensortap tracks into a run with one that the peer watches.

    `start` begins to watch a training; it returns what to call after each step, and that stops
    watching when it gets None.
    """
    import torch

    import tensortap as tap
    from bench.gpt import Training

    torch.set_num_threads(2)
    _no_server()
    trainings = [Training() for _ in range(3)]  # hooks of one do not see the other
    for training in trainings:
        training.step()
    with disk() as folder:
        tap.init(folder)
        mine, watched, bare = trainings

        def ours() -> float:
            with tap.track(mine.model, optimizer=mine.optimizer) as tracker:
                return time_of(lambda: tracker.step(loss=mine.step()))

        def theirs() -> float:
            after = start(watched)
            try:
                return time_of(lambda: after(watched.step()))
            finally:
                after(None)

        a, b, c = in_turns(rounds, ours, theirs, lambda: time_of(bare.step))
        assert tap.flush(60)
        assert not tap.receipt().dropped
        tap.finish()
    alone = statistics.median(c)
    ratios = [statistics.median(times) / alone for times in (a, b)]
    note = f"tap.track into a run, {how}; {ratios[0]:.2f} and {ratios[1]:.2f} × the step alone"
    return [Row(f"{STEP} ÷ {name}", None, True, a, b, note=note)]


@peer("wandb", CALL.format("1, 16 MiB"), STEP)
def peers_wandb() -> list[Row]:
    import wandb

    with disk() as folder:
        run = wandb.init(
            mode="offline", dir=folder, project="bench", settings=wandb.Settings(silent=True)
        )

        def log(x, name: str) -> None:
            run.log({name: wandb.Histogram(x.numpy())})

        def start(training) -> Callable[[float], object]:
            run.watch(training.model, log="all", log_freq=1)

            def after(loss: float | None) -> None:
                if loss is None:
                    run.unwatch(training.model)
                else:
                    run.log({"loss": loss})

            return after

        rows = _histograms(log, "log of wandb.Histogram (offline)", "wandb")
        rows += _steps(start, "wandb.watch(log='all', log_freq=1), offline", "wandb")
        run.finish()
    return rows


@peer("tensorboard", CALL.format("1, 16 MiB"), STEP)
def peers_tensorboard() -> list[Row]:
    from torch.utils.tensorboard import SummaryWriter

    with disk() as folder, SummaryWriter(folder) as writer:

        def start(training) -> Callable[[float], object]:
            hooks = [
                module.register_forward_hook(
                    lambda _, __, out, name=name: writer.add_histogram(f"out/{name}", out)
                )
                for name, module in training.model.named_modules()
            ]

            def after(loss: float | None) -> None:
                if loss is None:
                    for hook in hooks:
                        hook.remove()
                    return
                for name, parameter in training.model.named_parameters():
                    writer.add_histogram(f"weight/{name}", parameter)
                    writer.add_histogram(f"gradient/{name}", parameter.grad)

            return after

        rows = _histograms(
            lambda x, name: writer.add_histogram(name, x), "add_histogram", "TensorBoard"
        )
        how = "add_histogram of outputs, weights and their gradients"
        return rows + _steps(start, how, "TensorBoard", 2)


@peer("trackio", CALL.format("1, 16 MiB"))
def peers_trackio() -> list[Row]:
    with disk() as folder:
        os.environ["TRACKIO_DIR"] = str(folder)
        import trackio

        trackio.init(project="bench", embed=False)

        def log(x, name: str) -> None:
            trackio.log({name: trackio.Histogram(x.numpy())})

        rows = _histograms(log, "trackio.log of a histogram", "trackio")
        trackio.finish()
    return rows


@peer("torch", STEP)
def peers_debug_mode() -> list[Row]:
    from torch.utils._debug_mode import DebugMode

    def start(training) -> Callable[[float], object]:
        stack = contextlib.ExitStack()
        stack.enter_context(DebugMode())
        stack.enter_context(DebugMode.log_tensor_hashes())

        def after(loss: float | None) -> None:
            if loss is None:
                stack.close()

        return after

    return _steps(start, "DebugMode with log_tensor_hashes, in memory", "torch DebugMode")


ROWS = (peers_wandb, peers_tensorboard, peers_trackio, peers_debug_mode)
