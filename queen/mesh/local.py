"""The channel between the workers of one broker: a Unix socket each, in the run directory.

It is the mesh once more, with the same frames, listener and diallers; the directory's mode stands for the
secret. Besides hints it carries questions, which a worker asks all its siblings at once: what they have
counted, and that they have heard of a flip.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import gevent
from gevent import socket
from gevent.event import Event

from queen.engine.siblings import RunDirectoryError, Siblings
from queen.log import Log
from queen.mesh.dialler import Dialler, PeerGone
from queen.mesh.frames import Tag, decode_object, encode_object
from queen.mesh.hello import Doorkeeper, Hello, hello
from queen.mesh.inbound import Inbound, Source
from queen.mesh.listener import Listener

log = Log("siblings")

_SUFFIX = ".sock"
_NEW = ".new"
_SCAN_SECONDS = 1.0
_HEARTBEAT = 5.0
_STALL = 5.0
_IDLE = 60.0
_MOST = 1024
_BACKLOG = 128
_PATH_LIMIT = 100  # of a Unix socket's path, a little below what Linux takes


@dataclass(slots=True)
class Question:
    """What is asked, and of whom an answer is still missing."""

    missing: set[str]
    answers: list[Any] = field(default_factory=list)
    done: Event = field(default_factory=Event)

    def drop(self, instance: str) -> None:
        """No (more) answer comes from a sibling."""
        self.missing.discard(instance)
        if not self.missing:
            self.done.set()


class LocalChannel:
    """This worker's end. ``answers`` has, by topic, what answers a sibling's question."""

    def __init__(
        self,
        siblings: Siblings,
        server_id: str,
        inbound: Inbound,
        answers: Mapping[str, Callable[[Any], Any]],
        joined: Callable[[], None],
    ) -> None:
        self._siblings = siblings
        self._server_id = server_id
        self._inbound = inbound
        self._answers = answers
        self._joined = joined
        self._directory = -1
        self._links: dict[str, Dialler] = {}
        self._heard: Counter[str] = Counter()  # accepted connections by sibling
        self._asked: dict[int, Question] = {}
        self._numbers = count(1)
        self._listener = Listener(Doorkeeper(), self, _IDLE, _MOST)
        self._loop: gevent.Greenlet[[], None] | None = None

    def start(self) -> None:
        """Opens this worker's socket and dials the others. Raises `RunDirectoryError`."""
        try:
            bound = self._bound()
        except OSError as error:
            directory = self._siblings.directory
            raise RunDirectoryError(f"QUEEN_RUN_DIR {directory} can't hold a socket: {error}") from None
        self._inbound.start()
        self._listener.start(bound)
        self._loop = gevent.spawn(self._scan)

    def _bound(self) -> socket.socket:
        name = self._siblings.instance
        self._directory = os.open(self._siblings.directory, os.O_RDONLY | os.O_DIRECTORY)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound.bind(self._address(name, _NEW))
        bound.listen(_BACKLOG)
        # A socket that refuses connections is taken for a dead worker's, so it gets its name only now.
        os.rename(name + _NEW, name + _SUFFIX, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        return bound

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.kill(block=False)
        self._listener.stop()
        self._inbound.stop()
        for link in self._links.values():
            link.stop()
        self._links.clear()
        if self._directory >= 0:
            with suppress(OSError):
                os.unlink(self._siblings.instance + _SUFFIX, dir_fd=self._directory)
            os.close(self._directory)
            self._directory = -1

    @property
    def linked(self) -> bool:
        """Whether there are siblings to tell."""
        return bool(self._links)

    def knows(self, instance: str) -> bool:
        """Whether that is a worker of this broker."""
        if instance == self._siblings.instance or instance in self._links or instance in self._heard:
            return True
        return len(instance) == 16 and instance.isalnum() and (self._siblings.directory / (instance + _SUFFIX)).exists()

    def offer(self, frame: bytes) -> None:
        """Queues a frame for every sibling. Never waits."""
        for link in self._links.values():
            link.offer(frame)

    def ask(self, topic: str, value: Any, seconds: float) -> list[Any]:
        """The siblings' answers, of those that answer in time."""
        asked = {instance for instance in self._heard if (link := self._links.get(instance)) and link.connected}
        if not asked:
            return []
        number = next(self._numbers)
        question = self._asked[number] = Question(asked)
        try:
            frame = encode_object(Tag.QUESTION, {"number": number, "topic": topic, "value": value})
            for instance in asked:
                self._links[instance].offer(frame)
            question.done.wait(seconds)
            return question.answers
        finally:
            del self._asked[number]

    # Receiving

    def opened(self, hello: Hello) -> Callable[[int, bytes], None]:
        """A sibling dialled, so it can be dialled."""
        source = Source(hello.server_id, hello.instance)
        self._heard[hello.instance] += 1
        self._dial(hello.instance)
        # It may have started before a flip and after the last one it was told of.
        self._joined()

        def take(tag: int, payload: bytes) -> None:
            if tag == Tag.QUESTION:
                self._answer(source, payload)
            elif tag == Tag.ANSWER:
                self._answered(source, payload)
            else:
                self._inbound.apply(source, tag, payload)

        return take

    def closed(self, hello: Hello) -> None:
        self._heard[hello.instance] -= 1
        if not self._heard[hello.instance]:
            del self._heard[hello.instance]
            for question in self._asked.values():
                question.drop(hello.instance)

    def _answer(self, source: Source, payload: bytes) -> None:
        question = decode_object(payload) or {}
        answer = self._answers.get(str(question.get("topic")))
        link = self._links.get(source.instance)
        if answer is not None and link is not None:
            value = answer(question.get("value"))
            link.offer(encode_object(Tag.ANSWER, {"number": question.get("number"), "value": value}))

    def _answered(self, source: Source, payload: bytes) -> None:
        answer = decode_object(payload) or {}
        number = answer.get("number")
        question = self._asked.get(number) if isinstance(number, int) else None
        if question is not None and source.instance in question.missing:
            question.answers.append(answer.get("value"))
            question.drop(source.instance)

    # Dialling

    def _scan(self) -> None:
        """Finds siblings that have not dialled; one that has just started dials by itself."""
        while True:
            for name in self._names():
                if name.endswith(_SUFFIX):
                    self._dial(name.removesuffix(_SUFFIX))
            gevent.sleep(_SCAN_SECONDS)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._directory)
        except OSError as error:
            log.sampled(60, "run directory can't be read", directory=self._siblings.directory, error=error)
            return []

    def _dial(self, instance: str) -> None:
        if instance == self._siblings.instance or instance in self._links or not instance:
            return
        link = Dialler(
            instance,
            lambda: self._connect(instance),
            lambda: (hello(self._server_id, self._siblings.instance, b""), None),
            _HEARTBEAT,
            _STALL,
            warn=False,
        )
        self._links[instance] = link
        link.start()

    def _connect(self, instance: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._address(instance))
        except (ConnectionRefusedError, FileNotFoundError):
            # Its process is gone; if it was killed its socket is left over.
            connection.close()
            self._links.pop(instance, None)
            with suppress(OSError):
                os.unlink(instance + _SUFFIX, dir_fd=self._directory)
            raise PeerGone from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _address(self, instance: str, suffix: str = _SUFFIX) -> str:
        path = str(self._siblings.directory / (instance + suffix))
        return path if len(path) <= _PATH_LIMIT else f"/proc/self/fd/{self._directory}/{instance}{suffix}"
