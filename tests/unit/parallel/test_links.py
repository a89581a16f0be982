"""Arrays between stages, over sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import ml_dtypes
import numpy as np
import pytest

from octavo.core.errors import InvariantError
from octavo.parallel.links import Kind, Link, StageFailedError

RNG = np.random.default_rng(0)


def tcp_pair() -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return Link(one), Link(other)


@pytest.fixture(params=["unix", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Link, Link]]:
    one, other = Link.pair() if request.param == "unix" else tcp_pair()
    with closing(one), closing(other):
        yield one, other


def arrays(count: int, rows: int, columns: int) -> list[np.ndarray]:
    return [RNG.standard_normal((rows, columns), np.float32) for _ in range(count)]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.int64, np.uint8])
def test_arrays_come_as_they_were(ends: tuple[Link, Link], dtype: type) -> None:
    one, other = ends
    sent = [array.astype(dtype) for array in arrays(2, 3, 5)]
    one.send(Kind.ACTIVATIONS, 4, sent)
    received = other.receive(Kind.ACTIVATIONS, 4, (2, 3, 5))
    assert received.dtype == dtype
    assert np.array_equal(received, sent)


def test_both_ends_send(ends: tuple[Link, Link]) -> None:
    one, other = ends
    one.send(Kind.ACTIVATIONS, 1, arrays(1, 2, 2))
    other.send(Kind.DRAFTS, 1, [np.array([[7, 8]])])
    assert one.receive(Kind.DRAFTS, 1, (1, 1, 9)).tolist() == [[[7, 8]]]
    assert other.receive(Kind.ACTIVATIONS, 1, (1, 2, 2)).shape == (1, 2, 2)


def test_rows_that_do_not_lie_together(ends: tuple[Link, Link]) -> None:
    one, other = ends
    (whole,) = arrays(1, 6, 8)
    one.send(Kind.ACTIVATIONS, 1, [whole[:, 3:]])
    assert np.array_equal(other.receive(Kind.ACTIVATIONS, 1, (1, 6, 8))[0], whole[:, 3:])


def test_a_message_may_be_larger_than_all_buffers(ends: tuple[Link, Link]) -> None:
    one, other = ends
    sent = arrays(3, 700, 900)
    sender = threading.Thread(target=one.send, args=(Kind.ACTIVATIONS, 1, sent))
    sender.start()
    received = other.receive(Kind.ACTIVATIONS, 1, (3, 700, 900))
    sender.join(10)
    assert np.array_equal(received, sent)


def test_a_message_that_comes_in_pieces() -> None:
    one, end = Link.pair()
    relay, other = Link.pair()
    with closing(one), closing(end), closing(relay), closing(other):
        sent = arrays(2, 3, 4)
        one.send(Kind.ACTIVATIONS, 1, sent)
        data = end._socket.recv(1000)

        def trickle() -> None:
            for byte in data:
                relay._socket.sendall(bytes([byte]))

        sender = threading.Thread(target=trickle)
        sender.start()
        assert np.array_equal(other.receive(Kind.ACTIVATIONS, 1, (2, 3, 4)), sent)
        sender.join(10)


def test_what_is_received_goes_into_the_buffer_if_that_is_large_enough(
    ends: tuple[Link, Link],
) -> None:
    one, other = ends
    buffer = np.zeros(100, np.uint8)
    for count, is_in_buffer in ((25, True), (26, False)):
        one.send(Kind.ACTIVATIONS, 1, arrays(1, 1, count))
        received = other.receive(Kind.ACTIVATIONS, 1, (1, 1, 26), buffer)
        assert np.shares_memory(received, buffer) is is_in_buffer


def test_what_is_left_of_earlier_steps_is_passed_over(ends: tuple[Link, Link]) -> None:
    one, other = ends
    one.send(Kind.ACTIVATIONS, 1, arrays(2, 100, 70))
    one.send_failure(2, "no memory")
    one.send(Kind.ACTIVATIONS, 3, arrays(1, 2, 2))
    assert other.receive(Kind.ACTIVATIONS, 3, (1, 2, 2)).shape == (1, 2, 2)


@pytest.mark.parametrize("reason", ["MemoryError", "", "x" * 1000])
def test_a_failure_comes_instead(ends: tuple[Link, Link], reason: str) -> None:
    one, other = ends
    one.send_failure(5, reason)
    one.send(Kind.ACTIVATIONS, 6, arrays(1, 2, 2))
    with pytest.raises(StageFailedError) as failure:
        other.receive(Kind.ACTIVATIONS, 5, (1, 2, 2))
    assert str(failure.value) == reason[:200]
    other.receive(Kind.ACTIVATIONS, 6, (1, 2, 2))


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 5, 5), (2, 4, 6)])
def test_more_than_is_expected_is_refused(
    ends: tuple[Link, Link], shape: tuple[int, int, int]
) -> None:
    one, other = ends
    one.send(Kind.ACTIVATIONS, 1, arrays(*shape))
    with pytest.raises(InvariantError, match=r"at most \(2, 4, 5\).*with arrays of"):
        other.receive(Kind.ACTIVATIONS, 1, (2, 4, 5))


def test_what_should_not_come_now_is_refused(ends: tuple[Link, Link]) -> None:
    one, other = ends
    one.send(Kind.DRAFTS, 3, [np.array([[1]])])
    with pytest.raises(InvariantError, match="step 3 waits for activations"):
        other.receive(Kind.ACTIVATIONS, 3, (1, 1, 1))
    one, other = Link.pair()
    with closing(one), closing(other):
        one.send(Kind.ACTIVATIONS, 4, arrays(1, 1, 1))
        with pytest.raises(InvariantError, match=r"step 3 waits .* of step 4 came"):
            other.receive(Kind.ACTIVATIONS, 3, (1, 1, 1))


def test_bytes_that_are_no_message_are_refused(ends: tuple[Link, Link]) -> None:
    one, other = ends
    one._socket.sendall(b"\xff" * 64)
    with pytest.raises(InvariantError, match="dtype 255"):
        other.receive(Kind.ACTIVATIONS, 3, (1, 1, 1))


def test_arrays_of_one_message_are_alike() -> None:
    one, other = Link.pair()
    with closing(one), closing(other), pytest.raises(InvariantError, match="several shapes"):
        one.send(Kind.ACTIVATIONS, 1, [*arrays(1, 2, 3), *arrays(1, 3, 2)])


@pytest.mark.parametrize("num_bytes", [0, 10, 40])
def test_the_other_end_is_gone(ends: tuple[Link, Link], num_bytes: int) -> None:
    """Between messages, within a header and within arrays."""
    one, other = ends
    one.send(Kind.ACTIVATIONS, 1, arrays(1, 10, 10))
    data = other._socket.recv(1000)
    one._socket.sendall(data[:num_bytes])
    one.close()
    with pytest.raises(EOFError, match="gone"):
        other.receive(Kind.ACTIVATIONS, 1, (1, 10, 10))
    with pytest.raises(EOFError, match="gone"):
        other.send(Kind.ACTIVATIONS, 1, arrays(1, 4000, 1000))


def test_an_end_that_goes_while_the_other_waits(ends: tuple[Link, Link]) -> None:
    one, other = ends
    found: list[str] = []

    def wait() -> None:
        try:
            other.receive(Kind.ACTIVATIONS, 1, (1, 10, 10))
        except EOFError as error:
            found.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    one.close()
    waiter.join(10)
    assert found == ["the other stage is gone"]
