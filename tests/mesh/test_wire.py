"""Objects on the wire: tensors come out as they went in, descriptors are given back, frames survive any cutting."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading

import internals
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANGS

from spmd.mesh import wire
from spmd.mesh.pickling import objects
from spmd.mesh.pickling.functions import travels_by_name
from spmd.mesh.readers.stacked import Stacked

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """What other tests have left is not closed while descriptors are counted here."""
    gc.collect()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def there_and_back(obj, name_of=None, object_of=None):
    """Through a real socket, sender and receiver on two threads."""
    ours, theirs = socket.socketpair()
    packet = wire.dumps(obj, name_of)
    packet.head = b"a head"
    sending = threading.Thread(target=wire.send, args=(ours, packet))
    sending.start()
    receiver, packets = wire.Receiver(theirs), []
    while not packets:
        packets = receiver.receive(block=True)
    sending.join()
    assert packets[0].head == b"a head"
    try:
        return wire.loads(packets[0], object_of)
    finally:
        for one in (ours, theirs, packet, *packets):
            one.close()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    for shape in ((), (0,), (3, 0, 2), (5,), (2, 3, 4)):
        tensor = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 2).to(dtype)
        assert same(there_and_back(tensor), tensor)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(4)), st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_the_order_of_dimensions_in_memory_is_kept(order, sizes):
    tensor = torch.arange(torch.Size(sizes).numel()).reshape(sizes).permute(order)
    back = there_and_back(tensor)
    assert same(back, tensor)


def test_layouts_in_memory():
    image = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    back = there_and_back(image)
    assert same(back, image) and back.is_contiguous(memory_format=torch.channels_last)
    gray = torch.randn(2, 1, 5, 7).to(memory_format=torch.channels_last)  # contiguous both ways, but for its strides
    assert same(there_and_back(gray), gray)
    unusual = torch.empty_strided((1, 3, 1), (17, 1, 99)).zero_()
    assert same(there_and_back(unusual), unusual)
    turned = torch.randn(40, 6)[::2].t()
    assert torch.equal(there_and_back(turned), turned) and there_and_back(turned).stride() == (1, 6)
    strided = torch.arange(20)[::2]
    assert torch.equal(there_and_back(strided), strided)
    expanded = torch.tensor([[1.0], [2.0]]).expand(2, 3)
    assert torch.equal(there_and_back(expanded), expanded) and there_and_back(expanded).is_contiguous()
    turned = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert torch.equal(there_and_back(turned), turned) and torch.equal(there_and_back(turned.imag), turned.imag)


def test_a_view_travels_without_its_base():
    base = torch.zeros(1 << 20)
    assert len(wire.to_bytes(base[:4])) < 2000


def test_tied_tensors_stay_tied():
    tensor, other = torch.ones(3), torch.ones(3)
    back = there_and_back({"a": tensor, "b": [tensor, other]})
    assert back["a"] is back["b"][0] and back["b"][1] is not back["a"]
    linear = torch.nn.Linear(2, 2, bias=False)
    pair = there_and_back(torch.nn.ModuleDict({"one": linear, "two": linear}))
    assert pair["one"].weight is pair["two"].weight


def test_parameters():
    frozen, trainable = torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.nn.Parameter(torch.ones(2))
    back = there_and_back([frozen, trainable, torch.ones(2, requires_grad=True), trainable * 2])
    assert [type(x) for x in back] == [torch.nn.Parameter] * 2 + [torch.Tensor] * 2
    assert [x.requires_grad for x in back] == [False, True, True, False]  # a graph does not travel


def test_attributes_of_parameters():
    """Programs mark them, to leave some out of weight decay, say."""
    linear = torch.nn.Linear(2, 3).requires_grad_(False)
    linear.weight.no_decay, linear.weight.of = True, linear
    back, weight = there_and_back([linear, linear.weight])
    assert back.weight is weight and type(weight) is torch.nn.Parameter and not weight.requires_grad
    assert vars(weight) == {"no_decay": True, "of": back} and not vars(back.bias)
    assert torch.equal(weight, linear.weight)
    before = objects.dumps(linear.bias)
    linear.bias.no_decay = True
    assert objects.dumps(linear.bias) != before  # so that what refers to it is sent again


def test_what_is_no_plain_tensor_is_pickled_as_torch_does():
    sparse = torch.tensor([[0.0, 1.0]]).to_sparse()
    meta = torch.empty(3, device="meta")
    back = there_and_back([sparse, meta, torch.float32, torch.Size([1, 2])])
    assert torch.equal(back[0].to_dense(), sparse.to_dense()) and back[1].is_meta and back[1].shape == (3,)
    assert back[2:] == [torch.float32, torch.Size([1, 2])]


def test_many_and_large_tensors_go_through_a_memfd():
    before = descriptors()
    values = [torch.randn(1000, 33), torch.tensor(1.0), torch.empty(0), torch.randn(1 << 18), torch.ones(3).bfloat16()]
    packet = wire.dumps(values)
    assert packet.fd is not None and not packet.inline
    packet.close()
    packet.close()
    back = there_and_back(values)
    assert all(map(torch.equal, back, values))
    back[0].zero_()  # copy on write: nobody else sees this
    assert back[1] == 1.0
    del back
    assert descriptors() == before


@pytest.mark.parametrize("room", [None, memoryview(bytearray(1 << 20))])
def test_what_is_stacked_arrives_as_one_tensor(room):
    samples = [torch.rand(60, 70).t() for _ in range(8)]
    stacked = Stacked.of(samples)
    packet = wire.dumps({"x": stacked, "y": torch.arange(3)}, allocate=None if room is None else lambda nbytes: room)
    found = wire.loads(packet, memory=room)
    packet.close()
    assert same(found["x"], torch.stack(samples)) and found["y"].tolist() == [0, 1, 2]
    assert Stacked.of(samples[:2]) is None and Stacked.of([*samples, torch.rand(70, 61)]) is None


def test_what_could_not_be_packed_leaves_no_descriptor():
    before = descriptors()
    with pytest.raises(RuntimeError, match="equal size"):
        wire.dumps(Stacked([torch.ones(40_000), torch.ones(3)]))
    assert descriptors() == before


def test_what_was_received_is_private():
    packet = wire.dumps(torch.zeros(1 << 16))
    one, two = wire.loads(packet), wire.loads(packet)
    one += 1
    assert two.sum() == 0 and wire.loads(packet).sum() == 0
    packet.close()


def test_names_stand_for_what_stays():
    class Mesh:
        pass

    mesh = Mesh()
    back = there_and_back(
        {"mesh": mesh, "x": torch.ones(1)},
        lambda obj: ("mesh", 7) if isinstance(obj, Mesh) else None,
        lambda name: f"view {name}",
    )
    assert back == {"mesh": "view ('mesh', 7)", "x": torch.ones(1)}


def test_content_hash_tells_contents_apart():
    def hashed(obj, head=b""):
        packet = wire.dumps(obj)
        packet.head = head
        try:
            return wire.content_hash(packet)
        finally:
            packet.close()

    assert hashed([1, torch.ones(2)]) == hashed([1, torch.ones(2)], head=b"other")
    small, large = torch.zeros(2), torch.zeros(1 << 16)
    changed_small, changed_large = small.clone(), large.clone()
    changed_small[1] = changed_large[-1] = 1
    several = [small, changed_small, large, changed_large, small.double(), small.reshape(2, 1), 2]
    assert len({hashed(one) for one in several}) == len(several)


def test_bytes_hold_an_object_with_all_its_tensors():
    for value in (torch.arange(5), torch.arange(1 << 16), torch.arange(6).reshape(2, 3).T):
        assert torch.equal(wire.from_bytes(wire.to_bytes([value]))[0], value)
    assert wire.from_bytes(wire.to_bytes("text")) == "text"
    assert wire.from_bytes(wire.to_bytes(os, lambda obj: "os" if obj is os else None), lambda name: name) == "os"


@pytest.fixture
def reads_little(monkeypatch):
    """Files are read in small portions, as Linux reads them in portions of 2 GiB."""
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 1000), at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:1000]], at))


@pytest.mark.usefixtures("reads_little")
def test_more_than_is_read_at_once():
    value = torch.arange(1 << 16)
    assert torch.equal(wire.from_bytes(wire.to_bytes(value)), value)
    before, memory = descriptors(), internals.laid_out_on_a_host(value)
    assert torch.equal(torch.frombuffer(memory, dtype=value.dtype), value) and descriptors() == before


# -- frames ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 1 << 17), min_size=1, max_size=5), st.integers(1, 4000))
def test_frames_survive_any_cutting(sizes, piece):
    before = descriptors()
    source, sink = socket.socketpair()
    relay_in, relay_out = socket.socketpair()
    packets = [wire.dumps(bytes(size)) for size in sizes]
    for packet, size in zip(packets, sizes, strict=True):
        packet.head = b"%d" % size

    def relay() -> None:
        while data := sink.recv(piece):
            relay_in.sendall(data)
        relay_in.shutdown(socket.SHUT_WR)

    def send() -> None:
        for packet in packets:
            wire.send(source, packet)
        source.shutdown(socket.SHUT_WR)

    threads = [threading.Thread(target=relay), threading.Thread(target=send)]
    for thread in threads:
        thread.start()
    receiver, found = wire.Receiver(relay_out), []
    while (some := receiver.receive(block=True)) is not None:
        found += some
    for thread in threads:
        thread.join()
    assert [wire.loads(packet) for packet in found] == [bytes(size) for size in sizes]
    assert [packet.head for packet in found] == [b"%d" % size for size in sizes]
    for one in (source, sink, relay_in, relay_out):
        one.close()
    assert descriptors() == before


def test_sending_without_waiting():
    """What the socket does not take is kept, with its descriptor, and nothing is lost or mixed up."""
    before = descriptors()
    ours, theirs = socket.socketpair()
    sender, receiver = wire.Sender(ours), wire.Receiver(theirs)
    values = [bytes([n]) * (n * 40_000) if n % 2 else torch.full((n * 9000,), n) for n in range(1, 12)]
    done = []
    for number, value in enumerate(values):
        packet = wire.dumps(value)
        packet.head = b"%d" % number
        done.append(sender.send(packet))
        packet.close()
    assert done[0] and not done[-1] and not sender.flush()
    found = []
    while len(found) < len(values):
        found += receiver.receive(block=False)
        sender.flush()
    assert sender.flush() and [int(packet.head) for packet in found] == list(range(len(values)))
    for packet, value in zip(found, values, strict=True):
        got = wire.loads(packet)
        assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value
        packet.close()
    for one in (ours, theirs):
        one.close()
    assert descriptors() == before


def test_half_a_frame_is_waited_for_and_given_up_cleanly():
    before = descriptors()
    ours, theirs = socket.socketpair()
    sender, receiver = wire.Sender(ours), wire.Receiver(theirs)
    assert receiver.receive(block=False) == []
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 13)
    packet = wire.dumps([bytes(1 << 20), torch.zeros(1 << 15)])
    assert not sender.send(packet) and not sender.send(packet)
    packet.close()
    assert receiver.receive(block=False) == []  # the descriptor has come, the bytes have not
    ours.close()
    while (some := receiver.receive(block=True)) is not None:
        assert some == []
    for one in (sender, receiver, theirs):
        one.close()
    assert descriptors() == before


def test_a_lost_connection_is_the_end_of_the_stream():
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(ConnectionError):
        wire.Sender(ours).send(wire.dumps(1))
    assert wire.Receiver(ours).receive(block=True) is None
    ours.close()


def test_which_classes_and_functions_travel_by_name():
    class Local:
        pass

    assert travels_by_name(wire.dumps) and travels_by_name(torch.nn.Linear.forward)
    assert not travels_by_name(Local) and not travels_by_name(lambda: 0)
    code = "from spmd.mesh.pickling.functions import travels_by_name\ndef f(): pass\nprint(travels_by_name(f))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=HANGS).stdout == b"False\n"
