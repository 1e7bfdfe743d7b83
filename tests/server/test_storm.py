"""A little of the storm of `make torture`: a thousand requests, most of them wrong."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from pathlib import Path

import pytest

from lowroll.types import BehaviorTag, Group, PolicySpan, Request, Rollout
from tests.fixtures.storm import Storm, difference, whole
from tests.fixtures.stormed import Stormed, Watch, folders


@pytest.mark.slow
def test_a_storm_leaves_good_answers_right_and_nothing_behind(tmp_path: Path) -> None:
    with Stormed(folders(tmp_path)) as server:
        storm = Storm(tmp_path, server, seed=1)
        problems = [found for found in storm.blow(1000) if found]
        assert problems == [] and server.alive
        asked = storm.statuses
    assert sum(asked.values()) > 700 and asked[200] > 300
    assert {200, 400, 401, 408, 409, 415} <= asked.keys() and not asked[500]


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 Oh\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nServer: aiohttp/3\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n<x at 0x7f3aa01bcd>",
        b"HTTP/1.1 400 No\r\nContent-Length: 12\r\n\r\n/private/key",
        b"HTTP/1.1 400 No\r\nContent-Length: 20\r\n\r\nTraceback (most rece",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhalf",
    ],
)
def test_the_storm_notices_what_no_answer_may_be(raw: bytes) -> None:
    storm = Storm.__new__(Storm)
    storm.statuses, storm.private = Counter(), b"/private"
    assert storm.looked(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").body == b"ok"
    with pytest.raises((AssertionError, ValueError)):
        storm.looked(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_an_answer_is_whole_with_its_last_byte(raw: bytes) -> None:
    assert [at for at in range(len(raw) + 1) if whole(raw[:at])] == [len(raw)]


def test_the_storm_notices_another_token_log_prob_and_end() -> None:
    tag = BehaviorTag((PolicySpan(0, "a"),), weights="int4")
    rollout = Rollout([3, 4], [-1.0, -2.0], "length", tag)
    group = Group(Request([5]), [rollout])
    assert difference([([3, 4], [-1.0, -2.0], "length")], group, False) == ""
    assert difference([([3], [-1.0], "abort")], group, True) == ""
    for told in (
        [],
        [([3, 5], [-1.0, -2.0], "length")],
        [([3, 4], [-1.0, -2.0000000001], "length")],
        [([3, 4], [-1.0, -2.0], "stop")],
        [([3], [-1.0], "abort")],
        [([3], [-1.0], "length")],
    ):
        assert difference(told, group, False)


def test_what_a_server_opens_and_does_is_watched(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    (shelf / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("x")
    watch = Watch([shelf])
    watch.on = True
    try:
        (shelf / "in").write_text("x")
        assert not watch.opened
        (shelf / "out").read_text()
        (shelf / ".." / "secret").read_text()
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.settimeout(0.1)
            sock.connect(("127.0.0.1", 9))
    finally:
        watch.on = False
    assert watch.opened == {str(shelf / "out"), str(tmp_path / "secret")}
    assert [act.split()[0] for act in watch.acts] == ["socket.connect"]
