"""Requests of another process to change the number of workers of a running run, and the driver's replies."""

from __future__ import annotations

import json
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

from raytrain_hpc.driver.mailbox import Mailbox
from raytrain_hpc.errors import ConfigError, RunDirectoryError

_log = logging.getLogger(__name__)
REQUEST_NAME, REPLY_NAME = "resize_request.json", "resize_reply.json"
_POLL_INTERVAL_S = 0.5  # of the driver
_REPLY_INTERVAL_S = 0.1  # between two looks for the reply
_REPEAT_INTERVAL_S = 3.0  # a driver that starts ignores the request that it finds

Workers = int | Literal["auto"]


@dataclass(frozen=True)
class ResizeRequest:
    """A number of workers, or `auto`, that another process asks for."""

    request_id: str
    workers: Workers


@dataclass(frozen=True)
class ResizeReply:
    """The driver's reply: `previous` and new target, or with `remedy`, the reason of a refusal.

    `free`: CPUs and GPUs of the cluster that nothing holds, in words; "" if unknown.
    """

    request_id: str
    previous: int
    target: int
    remedy: str = ""
    free: str = ""


def describe_free_resources() -> str:
    """Return the free CPUs and GPUs of the cluster that this process is connected to, "" if it is to none."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    free: dict[str, float] = ray.available_resources()
    return f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"


class ResizeListener:
    """Listener for requests in a thread of the driver.

    `resize` is called with each request and raises ConfigError to refuse it; `get_target` returns the target number of
    workers. `describe_free`: see `ResizeReply.free`.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        resize: Callable[[Workers], None],
        get_target: Callable[[], int],
        describe_free: Callable[[], str] = describe_free_resources,
    ):
        self._mailbox, self._resize, self._get_target, self._describe_free = mailbox, resize, get_target, describe_free
        self._handled_id = ""

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Handle requests within the context. One that was sent before is for an earlier driver and ignored."""
        request = self._read_request()
        self._handled_id = "" if request is None else request.request_id
        closed = threading.Event()
        thread = threading.Thread(target=self._run, args=(closed,), name="resize", daemon=True)
        thread.start()
        try:
            yield
        finally:
            closed.set()

    def poll(self) -> None:
        """Handle the request that has come since the last call, if there is one."""
        request = self._read_request()
        if request is None or request.request_id == self._handled_id:
            return
        previous, remedy = self._get_target(), ""
        try:
            self._resize(request.workers)
        except ConfigError as error:
            remedy = error.remedy
        reply = ResizeReply(request.request_id, previous, self._get_target(), remedy, self._describe_free())
        self._mailbox.write(REPLY_NAME, json.dumps(asdict(reply)).encode())
        self._handled_id = request.request_id

    def _run(self, closed: threading.Event) -> None:
        while not closed.wait(_POLL_INTERVAL_S):
            try:
                self.poll()
            except OSError as error:  # the reply is written when storage is back
                _log.warning("a resize request cannot be read or answered: %s", error)

    def _read_request(self) -> ResizeRequest | None:
        content = self._mailbox.read(REQUEST_NAME)
        if content is None:
            return None
        try:
            return ResizeRequest(**json.loads(content))
        except (ValueError, TypeError) as error:
            _log.warning("%s is not a resize request: %s", REQUEST_NAME, error)
            return None


def send_resize(mailbox: Mailbox, workers: Workers, timeout_s: float) -> ResizeReply:
    """Send a request to the driver of the run and return its reply.

    Raises ConfigError if the driver refuses the number, and RunDirectoryError if it does not reply within `timeout_s`
    seconds, or if the mailbox cannot be used.
    """
    deadline, sent_at, request_id = time.monotonic() + timeout_s, 0.0, ""
    try:
        while (now := time.monotonic()) < deadline:
            if not sent_at or now > sent_at + _REPEAT_INTERVAL_S:
                request_id, sent_at = secrets.token_hex(8), now
                mailbox.write(REQUEST_NAME, json.dumps(asdict(ResizeRequest(request_id, workers))).encode())
            time.sleep(_REPLY_INTERVAL_S)
            content = mailbox.read(REPLY_NAME)
            reply = None if content is None else ResizeReply(**json.loads(content))
            if reply is not None and reply.request_id == request_id:
                if reply.remedy:
                    raise ConfigError("workers", workers, "resize", reply.remedy)
                return reply
    except OSError as error:
        raise RunDirectoryError(f"the request cannot be sent: {error}; write access to the run is needed") from error
    raise RunDirectoryError(
        f"the driver did not reply within {timeout_s:g} s; it may still be starting: try again, or see its output"
    )
