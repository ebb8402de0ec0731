"""Copies from a device, which is simulated on the CPU: a test decides when a copy happens."""

import gc
import threading
import weakref

import pytest
import torch

from tensortap.core.buffers import Pool
from tensortap.core.errors import CaptureError
from tensortap.core.record import TensorData
from tensortap.values import rebuild
from tensortap.values.torch import tensors
from tensortap.values.torch.cuda import Courier, CudaPort


class FakeEvent:
    def __init__(self, port, job):
        self.port = port
        self.job = job
        self.done = threading.Event()
        self.lock = threading.Lock()

    def run(self):
        with self.lock:
            if not self.done.is_set():
                self.job()
                self.done.set()

    def query(self):
        return self.done.is_set()

    def synchronize(self):
        self.port.calls.append("synchronize")
        assert self.done.wait(60)


class FakePort:
    """A simulated device whose side stream runs when `run` is called."""

    def __init__(self, room=True, pins=True):
        self.calls = []
        self.room = room
        self.pins = pins
        self.is_capturing = False
        self.queue = []

    def capturing(self):
        return self.is_capturing

    def has_room(self, tensor, nbytes):
        self.calls.append("has_room")
        assert nbytes == tensor.nbytes
        return self.room

    def pin(self, address, nbytes):
        self.calls.append("pin")
        return self.pins

    def unpin(self, address):
        self.calls.append("unpin")

    def clone(self, tensor):
        self.calls.append("clone")
        if self.room == "taken":
            raise torch.cuda.OutOfMemoryError
        return CudaPort.clone(self, tensor)

    def copy(self, source, into):
        self.calls.append("copy")
        event = FakeEvent(self, lambda: into.copy_(source))
        self.queue.append(event)
        return event

    def wait(self, event, tensor):
        # the current stream continues after the copy
        self.calls.append("wait")
        event.run()

    def run(self):
        for event in self.queue:
            event.run()
        self.queue.clear()


def send(courier, tensor, pool):
    name = str(tensor.dtype).removeprefix("torch.")
    lease = courier.send(tensor, tensor.nbytes, pool)
    return TensorData("torch", name, tuple(tensor.shape), lease)


def test_order_of_device_operations(pool):
    port = FakePort()
    node = send(Courier(port), torch.ones(5), pool)
    assert port.calls == ["pin", "has_room", "clone", "copy"]
    port.run()
    rebuild(node)
    assert port.calls[4:] == ["synchronize"]
    rebuild(node)
    assert port.calls[5:] == []  # the bytes have arrived


@pytest.mark.parametrize("room", [True, False, "taken"])
@pytest.mark.parametrize("shape", [(), (5,), (300, 400)])
def test_copies_the_value_at_the_call(room, shape, pool):
    port = FakePort(room)
    tensor = torch.ones(shape)
    node = send(Courier(port), tensor, pool)
    tensor.add_(1)
    port.run()
    assert torch.equal(rebuild(node), torch.ones(shape))
    assert ("wait" in port.calls) == (room is not True)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int3, torch.complex128]
)
def test_dtypes_and_layouts(dtype, pool):
    for room in (True, False):
        port = FakePort(room)
        raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(4, 6)
        tensor = raw.T[1:, ::2]
        node = send(Courier(port), tensor, pool)
        port.run()
        bits = torch.uint8 if dtype.itemsize == 1 else dtype
        assert rebuild(node).dtype == dtype
        expected = tensor.view(bits).contiguous().view(torch.uint8)
        assert torch.equal(rebuild(node).view(torch.uint8), expected)


def test_readers_wait_for_the_copy(pool):
    port = FakePort()
    node = send(Courier(port), torch.arange(50_000.0), pool)
    seen = []
    reader = threading.Thread(target=lambda: seen.append(rebuild(node)))
    reader.start()
    reader.join(0.1)
    assert reader.is_alive()
    assert not seen
    port.run()
    reader.join(60)
    assert torch.equal(seen[0], torch.arange(50_000.0))


@pytest.mark.parametrize("pins", [True, False])
def test_unpins_a_segment_before_unmapping_it(pins):
    port = FakePort(pins=pins)
    courier, pool = Courier(port), Pool()
    node = send(courier, torch.ones(5000), pool)
    port.run()
    rebuild(node)
    segment = node.data.segment
    memory = weakref.ref(segment.memory)
    mapped = []
    port.unpin = lambda address: mapped.append((address, memory() is not None))
    address = segment.address
    del node, segment
    port.queue.clear()
    pool.renew()
    pool.acquire(1)  # the old arena has no blocks left
    gc.collect()
    assert mapped == ([(address, True)] if pins else [])
    assert memory() is None


def test_keeps_unused_leases_until_the_copy_is_done(pool):
    port = FakePort()
    courier = Courier(port)
    node = send(courier, torch.ones(5000), pool)
    place = node.data.segment, node.data.offset
    del node
    assert not pool._returned
    other = pool.acquire(20_000)
    assert (other.segment, other.offset) != place
    port.run()
    node = send(courier, torch.ones(5000), pool)  # releases what has arrived
    assert (node.data.segment, node.data.offset) == place
    assert len(courier.under_way) == 1
    assert port.calls.count("pin") == 1  # once for a segment


def test_rejects_tensors_while_a_graph_is_recorded(pool):
    port = FakePort()
    port.is_capturing = True
    with pytest.raises(CaptureError, match="after replay"):
        send(Courier(port), torch.ones(5), pool)
    assert port.calls == []


def test_snapshots_of_device_tensors_use_the_courier(pool, monkeypatch):
    """A tensor on the CPU claims to be on a device."""

    class OnDevice(torch.Tensor):
        is_cpu = False
        is_cuda = True

    port = FakePort()
    courier = Courier(port)
    monkeypatch.setattr("tensortap.values.torch.cuda.cuda", lambda: courier)
    for shape in ((), (3,), (200, 300)):
        tensor = torch.ones(shape)
        monkeypatch.setattr(torch.Tensor, "detach", lambda t: t.as_subclass(OnDevice))
        node, nbytes = tensors._snapshot_by_torch(tensor, pool)
        monkeypatch.undo()
        monkeypatch.setattr("tensortap.values.torch.cuda.cuda", lambda: courier)
        tensor.zero_()
        assert nbytes == tensor.nbytes
        assert len(courier.under_way) == 1
        port.run()
        assert torch.equal(rebuild(node), torch.ones(shape))
        assert len(courier.under_way) == 0


class LoggedStream:
    """A simulated stream that logs its calls."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.calls.append(f"event on {self.name}")
        return "event"

    def wait_event(self, event):
        self.calls.append(f"{self.name} waits for {event}")

    def __enter__(self):
        self.calls.append(f"on {self.name}")

    def __exit__(self, *error):
        self.calls.append(f"off {self.name}")


def test_calls_of_the_cuda_port(monkeypatch):
    calls = []
    main, side = LoggedStream("main", calls), LoggedStream("side", calls)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 << 20, 1000 << 20))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda t, s: calls.append(f"kept for {s.name}")
    )

    class Runtime:
        def cudaHostRegister(self, address, nbytes, flags):
            calls.append(("register", address, nbytes, flags))
            return 0

        def cudaHostUnregister(self, address):
            calls.append(("unregister", address))
            raise RuntimeError("CUDA is gone")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    port, tensor, into = CudaPort(), torch.ones(3), torch.zeros(3)
    assert not port.capturing()
    assert port.copy(tensor, into) == "event"
    assert calls == [
        "side waits for main", "on side", "event on side", "off side", "kept for side",
    ]  # fmt: skip
    assert torch.equal(into, tensor)
    calls.clear()
    port.wait("event", tensor)
    assert port.pin(4096, 8192)
    port.unpin(4096)
    assert calls == ["main waits for event", ("register", 4096, 8192, 1), ("unregister", 4096)]
    assert port.has_room(tensor, 1000)
    assert port.has_room(tensor, 20 << 20)
    assert not port.has_room(tensor, 40 << 20)
