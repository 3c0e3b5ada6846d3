"""Bytes over TCP: the suite, and peers that lie, stall or come from elsewhere."""

import contextlib
import dataclasses
import errno
import os
import pickle
import socket
import threading

import numpy as np
import pytest
import torch
from processes import MakingPeer

from raycrew.tensor_transport.errors import ShardLostError, StaleHandleError
from raycrew.tensor_transport.testing import PullCase, check_transport, nothing_left
from raycrew.tensor_transport.transports import TcpTransport
from raycrew.tensor_transport.transports.tcp import wire as _wire

MIB = 1 << 20


@pytest.mark.hostile
@pytest.mark.slow
def test_conformance():
    check_transport(PullCase(TcpTransport, lambda: MakingPeer(TcpTransport)))


@pytest.fixture
def transport():
    with TcpTransport(idle_s=20) as transport:
        yield transport


def pulled(transport, offer, timeout_s=30):
    into = np.zeros(offer.size_bytes, np.uint8)
    transport.pull([offer.whole], [into], timeout_s=timeout_s).wait(60)
    return into


def changed(offer, **key):
    return dataclasses.replace(offer, key=offer.key._replace(**key))


def test_many_offers_over_several_connections(transport):
    sources = [np.full(4 * MIB + i, i, np.uint8) for i in range(9)]
    offers = [transport.offer(source, folded=True) for source in sources]
    into = [np.zeros_like(source) for source in sources]
    transport.pull([offer.whole for offer in offers], into).wait(60)
    assert all((got == want).all() for got, want in zip(into, sources, strict=True))


@pytest.mark.hostile
def test_a_token_is_neither_shown_nor_guessed(transport):
    offer = pickle.loads(pickle.dumps(transport.offer(torch.arange(9))))
    assert "offer" in repr(offer).lower() and offer.key.token.decode() not in repr(offer) + str(offer.key)
    with pytest.raises(ShardLostError) as caught:
        pulled(transport, changed(offer, token=b"guessed"))
    assert "another token" in str(caught.value) and "guessed" not in str(caught.value)
    assert (pulled(transport, offer).view(np.int64) == np.arange(9)).all()


@pytest.mark.hostile
def test_another_server_at_the_same_port_is_not_believed(transport):
    offer = transport.offer(torch.arange(9))
    with socket.create_server(("127.0.0.1", 0)) as liar:

        def lie():
            sock, _ = liar.accept()
            with sock:
                sock.sendall(b"n" * _wire.NONCE_BYTES)
                _wire.take(sock, _wire.NONCE_BYTES + _wire.PROOF_BYTES)
                sock.sendall(b"p" * _wire.PROOF_BYTES + bytes([_wire.HERE]) + bytes(72))

        thread = threading.Thread(target=lie)
        thread.start()
        with pytest.raises(ShardLostError, match="another server"):
            pulled(transport, changed(offer, port=liar.getsockname()[1]))
        thread.join()


@pytest.mark.hostile
def test_nobody_at_the_address(transport):
    offer = transport.offer(torch.arange(9))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(ShardLostError, match="does not answer"):
        pulled(transport, changed(offer, port=port))


@pytest.mark.hostile
@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" * 9, b"x" * 5, b""])
def test_whoever_does_not_speak_the_protocol_harms_nobody(transport, said):
    offer = transport.offer(torch.arange(9))
    with socket.create_connection(("127.0.0.1", offer.key.port)) as stranger:
        stranger.settimeout(30)
        try:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        except OSError as error:  # it was hung up on before it had said all
            assert error.errno in (errno.ENOTCONN, errno.EPIPE, errno.ECONNRESET)
        heard = b""
        try:
            while more := stranger.recv(1000):
                heard += more
        except ConnectionResetError:
            pass
        assert len(heard) <= _wire.NONCE_BYTES
    assert (pulled(transport, offer).view(np.int64) == np.arange(9)).all()


@pytest.mark.hostile
def test_too_many_requests_at_once_are_not_read(transport):
    offer = transport.offer(torch.arange(9))
    with socket.create_connection(("127.0.0.1", offer.key.port), timeout=30) as greedy:
        _wire.greet(greedy, offer.key.token, lambda: None)
        greedy.sendall((2**32 - 1).to_bytes(4, "little"))
        with pytest.raises((_wire.HangupError, ConnectionResetError)):
            _wire.take(greedy, 1)


@pytest.mark.hostile
def test_connections_above_the_limit_are_hung_up_on():
    with TcpTransport(max_connections=1) as transport:
        offer = transport.offer(torch.arange(9))
        with socket.create_connection(("127.0.0.1", offer.key.port), timeout=30) as first:
            _wire.greet(first, offer.key.token, lambda: None)
            with pytest.raises(ShardLostError, match="too many connections"):
                pulled(transport, offer)
            first.sendall(_wire.packed([_wire.Request(offer.key.name, 0, 72)]))
            assert _wire.take(first, 1)[0] == _wire.HERE, "who was there before is served"


@pytest.mark.hostile
def test_strangers_that_say_nothing_keep_nobody_out():
    with nothing_left(), TcpTransport(max_connections=2) as transport, contextlib.ExitStack() as stack:
        offer = transport.offer(torch.arange(9))

        def connected():
            sock = socket.create_connection(("127.0.0.1", offer.key.port), timeout=30)
            return stack.enter_context(contextlib.closing(sock))

        strangers = [connected() for _ in range(5)]
        for stranger in strangers[:3]:
            while stranger.recv(_wire.NONCE_BYTES):
                pass  # Its greeting, if that was sent before it had to make room.
        for _ in range(5):
            assert (pulled(transport, offer).view(np.int64) == np.arange(9)).all()
            strangers.append(connected())


@pytest.mark.hostile
def test_a_connection_that_gets_no_thread_is_hung_up_on_and_the_next_is_served(transport, monkeypatch):
    offer, start, refused = transport.offer(torch.arange(9)), threading.Thread.start, []

    def refuse_once(self):
        if self.name == "tcp-serving" and not refused:
            refused.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    with pytest.raises(ShardLostError):
        pulled(transport, offer)
    assert (pulled(transport, offer).view(np.int64) == np.arange(9)).all()


@pytest.mark.hostile
def test_what_is_withdrawn_while_it_is_sent_does_not_arrive(transport):
    offer = transport.offer(np.zeros(64 * MIB, np.uint8))
    into = np.zeros(offer.size_bytes, np.uint8)
    with socket.create_connection(("127.0.0.1", offer.key.port), timeout=30) as sock:
        _wire.greet(sock, offer.key.token, lambda: None)
        sock.sendall(_wire.packed([_wire.Request(offer.key.name, 0, offer.size_bytes)]))
        assert _wire.take(sock, 1)[0] == _wire.HERE
        transport.withdraw([offer])
        _wire.fill(sock, into.data)
        assert _wire.take(sock, 1)[0] == _wire.GONE
    with pytest.raises(StaleHandleError, match="withdrawn"):
        pulled(transport, offer)


@pytest.mark.hostile
def test_close_while_somebody_is_served_leaves_nothing():
    with nothing_left():
        transport = TcpTransport()
        offer = transport.offer(np.zeros(64 * MIB, np.uint8))
        with socket.create_connection(("127.0.0.1", offer.key.port), timeout=30) as sock:
            _wire.greet(sock, offer.key.token, lambda: None)
            sock.sendall(_wire.packed([_wire.Request(offer.key.name, 0, offer.size_bytes)]))
            _wire.take(sock, 1)
            transport.close()


@pytest.mark.hostile
def test_a_forked_child_pulls_from_its_parent_and_serves_by_itself(transport):
    offer = transport.offer(torch.arange(10))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            own = transport.offer(torch.arange(5))
            right = pulled(transport, offer).view(np.int64)[9] == 9 and pulled(transport, own).size == 40
            transport.close()
            code = 0 if right and own.key.port != offer.key.port else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pulled(transport, offer).view(np.int64)[3] == 3


def test_all_addresses_of_both_families():
    for host in ("0.0.0.0", "::1"):
        try:
            with TcpTransport(host) as transport:
                offer = transport.offer(torch.arange(9))
                assert offer.key.host not in ("0.0.0.0", "::")
                assert (pulled(transport, offer).view(np.int64) == np.arange(9)).all()
        except OSError:
            pytest.skip(f"no {host} here")


def test_wrong_options_are_refused():
    for wrong in ({"connections": 0}, {"max_connections": 0}, {"idle_s": 0}):
        with pytest.raises(ValueError, match="positive"):
            TcpTransport(**wrong)
