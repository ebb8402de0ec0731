"""`tensortap doctor --device`: check on the user's own device what our tests check on CPUs."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensortap as tap
from tensortap.core.errors import TensortapError
from tensortap.rooms.doctor.contract import Contract, expect

Row = dict[str, str]


def contracts(device: str) -> Iterator[tuple[str, Contract]]:
    """Yield the contract of a device of torch, or one for each device of JAX, with its name."""
    name, _, platform = device.partition(":")
    try:
        if name == "jax":
            import jax

            from tensortap.rooms.doctor.jax import JaxContract

            for place in jax.local_devices(backend=platform or None):
                yield f"{device} {place}", _on(JaxContract(), place)
        else:
            import torch

            from tensortap.rooms.doctor.torch import TorchContract

            torch.empty(1, device=device)
            yield device, _on(TorchContract(), device)
    except (ImportError, RuntimeError, AssertionError) as error:  # AssertionError: without CUDA
        raise TensortapError(
            "--device must be one of torch, such as cpu, cuda, cuda:1 or mps, or jax or "
            f"jax:<platform>, got {device!r}: {str(error).splitlines()[0]:.80}"
        ) from error


def _on(contract: Contract, device: Any) -> Contract:
    contract.device = device
    return contract


def examine_device(contract: Contract) -> Iterator[Row]:
    """Yield a row for each check; its result is ok, note or FAILED."""
    here, lacking = [], []
    for dtype in contract.dtypes:
        try:
            contract.contents(contract.one(dtype))
            here.append(dtype)
        except (RuntimeError, TypeError, ValueError):
            lacking.append(dtype)
    if lacking:
        yield _row("dtypes", "note", f"this device has none of {', '.join(lacking)}")
    yield _each("snapshots and rebuilt values", contract.check_snapshots, here)
    yield _each("digests", contract.check_digests, here)
    yield _each("statistics, against the CPU", contract.check_statistics, here)
    with tempfile.TemporaryDirectory() as folder:
        run = tap.init(folder)
        try:
            contents = {}
            for dtype in here:
                value = contract.one(dtype, (64, 64))
                contents[dtype] = contract.contents(value)
                tap.catch(value, dtype)
                contract.overwrite(value)
            tap.flush()
            stored = tap.open(run)

            def read(dtype: str) -> None:
                expect(contract.contents(stored.get(dtype)), contents[dtype], "bytes")

            yield _each("caught, overwritten, read from a run", read, here)
            yield from _training(contract)
            yield _waiting("tap.catch", contract, lambda value: tap.catch(value, "product"))
            with contract.observer(tap.track) as observe:
                yield _waiting("tap.track", contract, observe)
        finally:
            tap.finish()


def _row(check: str, result: str, details: str) -> Row:
    return {"check": check, "result": result, "details": details}


def _each(name: str, check: Callable[[str], None], dtypes: list[str]) -> Row:
    failed, without = [], []
    for dtype in dtypes:
        try:
            check(dtype)
        except Exception as error:  # whatever it is, the user has to see it
            if "no statistics on the device" in str(error):
                without.append(dtype)
            else:
                failed.append(f"{dtype}: {type(error).__name__}: {error}")
    if failed:
        return _row(name, "FAILED", "; ".join(failed))
    note = f"; not on devices: {', '.join(without)}" if without else ""
    return _row(name, "ok", f"{len(dtypes) - len(without)} dtypes{note}")


def _training(contract: Contract) -> Iterator[Row]:
    name = "training, bit for bit"
    try:
        _train(contract, None)  # the first one loads kernels
        (plain, seconds), (again, _) = _train(contract, None), _train(contract, None)
        before = tap.receipt()
        tracked, slower = _train(contract, tap.track)
        tap.flush()
        seen = tap.receipt().since(before)
        if not seen.tracked or seen.dropped:
            raise AssertionError(f"{seen.tracked} tensors tracked, dropped: {seen.reasons}")
    except Exception as error:
        yield _row(name, "FAILED", f"{type(error).__name__}: {error}")
        return
    if plain != again:
        yield _row(name, "note", "without tensortap, too, two trainings differ on this device")
    else:
        same = plain == tracked
        details = "a tracked model has the same weights after 10 steps"
        yield _row(name, "ok" if same else "FAILED", details if same else f"not so: {details}")
    cost = f"{seconds * 1e3:.2f} ms per step, {slower * 1e3:.2f} ms tracked in every step"
    yield _row("cost", "note", f"{cost} (a small model: the worst case)")


def _train(contract: Contract, track: Callable[..., Any] | None) -> tuple[bytes, float]:
    """Return the bits of a trained model, and the seconds of a step."""
    times = [time.perf_counter()]
    for bits in contract.train(track):
        times.append(time.perf_counter())
        last = bits
    return last, statistics.median(b - a for a, b in itertools.pairwise(times))


def _waiting(name: str, contract: Contract, capture: Callable[[Any], object]) -> Row:
    name = f"{name} does not wait"
    try:
        wait = contract.measure_wait(capture)
    except Exception as error:
        return _row(name, "FAILED", f"{type(error).__name__}: {error}")
    if wait is None:
        return _row(name, "note", "this device computes at once: nothing to wait for")
    captured, computed = (f"{seconds * 1e3:.1f} ms" for seconds in wait)
    waited = wait[0] > wait[1] / 2
    details = f"returned after {captured}, computed after {computed}"
    known = waited and not contract.asynchronous
    result = "note" if known else "FAILED" if waited else "ok"
    return _row(name, result, details + (", as documented" if known else ""))
