"""Rows on statistics."""

from __future__ import annotations

import statistics

from bench.harness import Row, in_turns, processor_time_of, time_of

MANY = 1 << 24


def naive(x):
    """Compute each statistic with one torch operation, as one would write it."""
    import torch

    size = x.abs()
    exponents = torch.frexp(x).exponent
    return {
        "mean": x.mean(),
        "std": x.std(),
        "min": x.min(),
        "max": x.max(),
        "mean_abs": size.mean(),
        "max_abs": size.max(),
        "min_abs": size.min(),
        "rm2": x.pow(2).mean().pow(1 / 2),
        "rm4": x.pow(4).mean().pow(1 / 4),
        "rm8": x.pow(8).mean().pow(1 / 8),
        "exponents": torch.bincount(exponents.flatten().to(torch.int64) + 150),
    }


def statistics_of_many() -> list[Row]:
    import numpy as np
    import torch

    from tensortap.values.torch.summarize import summarize

    torch.set_num_threads(1)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(MANY, np.float32))
    array = x.numpy()
    brain = x.bfloat16()

    ours, summed, halved = in_turns(
        61,  # milliseconds each: noise from other programs affects few of them
        lambda: time_of(lambda: summarize(x, threads=1)),
        lambda: time_of(array.sum),
        lambda: time_of(lambda: summarize(brain, threads=1)),
    )
    again, plain = in_turns(
        5,
        lambda: time_of(lambda: summarize(x, threads=1)),
        lambda: time_of(lambda: naive(x)),
    )
    note = "one thread"
    return [
        Row("statistics, 16M float32 ÷ numpy.sum", 4.0, True, ours, summed, note=note),
        Row(
            "statistics, 16M float32 ÷ one torch operation per statistic",
            1 / 30,
            True,
            again,
            plain,
            note=note,
        ),
        Row("statistics, 16M bfloat16 ÷ in float32", 0.6, True, halved, ours, note=note),
    ]


def digests_of_shards() -> list[Row]:
    """Compare digests with copies of the same arrays, both warm."""
    import numpy as np

    from tensortap.rooms.track.shard_digest import shard_digest

    rows = []
    for kib, bits in (
        (64, 32), (1024, 8), (1024, 16), (1024, 32), (1024, 64), (4096, 32), (16384, 32),
        (65536, 16), (65536, 32),
    ):  # fmt: skip
        data = np.random.default_rng(0).bytes(kib << 10)
        array = np.frombuffer(data, f"u{bits // 8}")
        warm, loops = array.copy(), max(1, 1024 // kib)
        digested, copied = in_turns(
            61,
            lambda array=array, loops=loops: time_of(lambda: shard_digest(array), loops),
            lambda array=array, loops=loops, to=warm: time_of(lambda: np.copyto(to, array), loops),
        )
        size = f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"
        name = f"digest of shards, {size} of {bits} bits ÷ memcpy"
        note = f"one thread, {array.nbytes / statistics.median(digested) / 1e9:.0f} GB/s"
        rows.append(Row(name, 2.0, True, digested, copied, note=note))
    return rows


def statistics_of_few() -> list[Row]:
    import torch

    from tensortap.values.torch.summarize import summarize

    torch.set_num_threads(1)
    rows = []
    for count, dtype, limit in (
        (1000, torch.float32, 4.0), (1000, torch.bfloat16, 4.0), (16_384, torch.float32, None)
    ):  # fmt: skip
        x = torch.randn(count).to(dtype)
        ours, summed = in_turns(
            101,
            lambda x=x: time_of(lambda: summarize(x, threads=1), 100),
            lambda x=x: time_of(lambda: torch.sum(x), 100),
        )
        name = f"statistics, {count:,} {str(dtype).removeprefix('torch.')} ÷ torch.sum"
        note = f"{statistics.median(ours) * 1e6:.1f} µs"
        rows.append(Row(name, limit, True, ours, summed, note=note))
    return rows


def digests_of_weights() -> list[Row]:
    """Compare the digest of a model of 1 GiB, as users call it, with reading its memory once."""
    import numpy as np
    import torch

    import tensortap as tap

    layers = [torch.nn.Linear(4096, 4096, bias=False) for _ in range(16)]
    model = torch.nn.Sequential(*layers)
    arrays = [layer.weight.detach().numpy().view(np.uint64) for layer in layers]
    calls = (
        lambda: tap.digest(model),
        lambda: [np.bitwise_xor.reduce(each, axis=None) for each in arrays],
    )
    rows = []
    for words, clock in (("", time_of), (", processor time", processor_time_of)):
        timed = [lambda call=call, clock=clock: clock(call) for call in calls]
        digested, read = in_turns(21, *timed)
        note = f"{16 * 64 / 1024 / statistics.median(digested):.1f} GiB/s, with both casts"
        name = f"digest of the weights of a model, 1 GiB of float32 ÷ one read by numpy{words}"
        rows.append(Row(name, 3.0, True, digested, read, note=note))
    return rows


ROWS = (statistics_of_many, statistics_of_few, digests_of_shards, digests_of_weights)
