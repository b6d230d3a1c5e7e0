"""Repetition of reads that fail because storage cannot be reached for a while."""

from __future__ import annotations

import errno
import random
import re
import socket
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

RETRY_TIMEOUT_S = 60.0
FIRST_DELAY_S, MAX_DELAY_S = 0.05, 5.0
_TRANSIENT_ERRORS = {
    *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY),
    *(errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ESHUTDOWN, errno.EPIPE),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET),
}
# pyarrow's errors of object stores have no number. Not repeated: refused credentials, and requests that are wrong.
_STORE_ERROR = re.compile(r"AWS Error|Azure|google::cloud::Status")
_FINAL_STORE_ERROR = re.compile(
    r"ACCESS_DENIED|PERMISSION_DENIED|UNAUTHENTICATED|NOT_FOUND|INVALID_|UNRECOGNIZED_|SIGNATURE"
    r"|(HTTP status|Azure Error: \[?)\W*(?!408|429)4\d\d"
)


def is_transient(error: OSError) -> bool:
    """Return whether an error says that storage cannot be reached now, not that a file is missing or damaged."""
    if error.errno is not None:
        return error.errno in _TRANSIENT_ERRORS
    text = str(error)
    return _STORE_ERROR.search(text) is not None and _FINAL_STORE_ERROR.search(text) is None


class ReadRetry:
    """Repetition of reads with growing, jittered delays, for at most `timeout_s` seconds each; 0: never.

    `log` gets a line when reads begin to fail, and one when they succeed again. Thread-safe.
    """

    def __init__(self, timeout_s: float = 0.0, log: Callable[[str], None] = lambda line: None) -> None:
        self._timeout_s, self._log = timeout_s, log
        self._random = random.Random()  # that of the module belongs to the user
        self._reported_until = 0.0  # monotonic time until which further failures are not reported

    def __call__(self, read: Callable[[], T], name: object) -> T:
        """Return `read()`. `name`: of the file, for the log.

        Raises the last OSError of `read` if it is not transient, or after the timeout.
        """
        began, delay_s, is_reported = time.monotonic(), FIRST_DELAY_S, False
        while True:
            try:
                result = read()
                break
            except OSError as error:
                if not is_transient(error) or time.monotonic() + delay_s > began + self._timeout_s:
                    raise
                is_reported = self._report(name, error) or is_reported
            time.sleep(delay_s * self._random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, MAX_DELAY_S)
        if is_reported:
            self._log(f"data    {name} is read again, after {time.monotonic() - began:.1f} s")
            self._reported_until = 0.0
        return result

    def _report(self, name: object, error: OSError) -> bool:
        """Log a failure, unless one of this outage has been. Return whether it was logged."""
        now = time.monotonic()
        if now < self._reported_until:
            return False
        self._reported_until = now + self._timeout_s
        reason = " ".join((error.strerror or str(error)).split())
        self._log(
            f"data    {name} cannot be read on node {socket.gethostname()} ({reason}); trying again for up to "
            f"{self._timeout_s:g} s"
        )
        return True


NO_RETRY = ReadRetry()
