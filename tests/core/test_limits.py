"""Sizes as people write them, and the memory of the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.core import limits
from tensortap.core.limits import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1), ("1kb", 1024), ("1 KiB", 1024), ("512 MiB", 512 << 20), ("8GB", 8 << 30),
        ("1.5 GiB", 3 << 29), (" 3 B ", 3), ("0.5K", 512),
    ],
)  # fmt: skip
def test_parses_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GB", "8 apples", "-8GB", "8GBs", "1e9", "1,000", "%", "1..5G", "8G8", "inf", "nan"],
)
def test_rejects_malformed_sizes(text):
    with pytest.raises(ValueError, match="size must look like '8GB', '512MB' or '50%'") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", [0, -1, "0", "0%", "0.2", "0 GB"])
def test_rejects_zero(text):
    with pytest.raises(ValueError, match="size must be more than 0"):
        parse_size(text)


def test_percent_is_relative_to_the_memory():
    assert parse_size("50%") == int(limits.total_memory() * 0.5)
    assert parse_size("12.5 %") == int(limits.total_memory() / 8)


@pytest.fixture
def files(monkeypatch):
    """Stand-ins for the files of the kernel."""
    files = {"/proc/meminfo": "MemTotal: 999 kB\nMemAvailable:   8388608 kB\n"}
    monkeypatch.setattr(limits, "_read", lambda path: files.get(path, ""))
    # not cached: a test changes the files after the first look
    monkeypatch.setattr(limits, "_limited_cgroups", limits._limited_cgroups.__wrapped__)
    return files


def test_total_memory_is_the_lowest_limit_of_all_control_groups(files):
    everything = limits.total_memory.__wrapped__()
    files["/proc/self/cgroup"] = "0::/user.slice/job.scope\n"
    files["/sys/fs/cgroup/user.slice/job.scope/memory.max"] = "max\n"
    assert limits.total_memory.__wrapped__() == everything
    files["/sys/fs/cgroup/user.slice/memory.max"] = f"{1 << 30}\n"
    assert limits.total_memory.__wrapped__() == 1 << 30
    files["/sys/fs/cgroup/user.slice/job.scope/memory.max"] = f"{1 << 29}\n"
    assert limits.total_memory.__wrapped__() == 1 << 29
    files["/sys/fs/cgroup/user.slice/job.scope/memory.max"] = f"{1 << 60}\n"
    assert limits.total_memory.__wrapped__() == 1 << 30


def test_reads_control_groups_of_version_1(files):
    files["/proc/self/cgroup"] = "7:cpu,cpuacct:/x\n4:memory:/slurm/job_7\n1:name=systemd:/\n"
    files["/sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes"] = f"{1 << 30}\n"
    files["/sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes"] = f"{3 << 28}\n"
    assert limits.total_memory.__wrapped__() == 1 << 30
    assert limits.available_memory() == 1 << 28


def test_reads_the_limit_of_a_container_at_the_root_of_its_mount(files):
    files["/proc/self/cgroup"] = "0::/kubepods/besteffort/pod1/abc\n"  # as the host names it
    files["/sys/fs/cgroup/memory.max"] = f"{1 << 30}\n"
    assert limits.total_memory.__wrapped__() == 1 << 30


def test_respects_the_limit_of_the_address_space():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from tensortap.core import limits\n"
        "print(limits.total_memory(), limits.available_memory(), limits.parse_size('10%'))"
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(source)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    total, available, tenth = map(int, done.stdout.split())
    assert total == 2 << 30
    assert 0 < available < 2 << 30
    assert tenth == total // 10


def test_available_memory_respects_the_limit_of_the_container(files):
    files["/proc/self/cgroup"] = "0::/\n"
    files["/sys/fs/cgroup/memory.max"] = f"{4 << 30}\n"
    files["/sys/fs/cgroup/memory.current"] = f"{3 << 30}\n"
    files["/sys/fs/cgroup/memory.stat"] = f"anon 5\ninactive_file {1 << 29}\nactive_file 7\n"
    assert limits.available_memory() == (4 << 30) - (3 << 30) + (1 << 29) + 7
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert limits.available_memory() == 8 << 30
    files["/sys/fs/cgroup/memory.max"] = f"{2 << 30}\n"
    assert limits.available_memory() == 0
    files.clear()
    assert limits.available_memory() == limits.total_memory()


@given(st.integers(1, 1 << 50))
def test_formatted_size_is_accurate(size):
    text = format_size(size)
    assert len(text) <= 10
    assert parse_size(text) == pytest.approx(size, rel=0.06)
