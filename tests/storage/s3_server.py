"""An S3 server in a thread, moto's, which can be told to fail."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from tests.storage.bucket import Bucket


@dataclass
class Request:
    """A request that the server has received."""

    method: str
    path: str
    query: str
    range: str


Interceptor = Callable[[Request, Callable[[], Response]], Response]


class S3Server(Bucket):
    """Server with one bucket. `intercept(request, forward)`, if set, answers each request; `forward()` executes it."""

    def __init__(self) -> None:
        self.intercept: Interceptor | None = None
        self.requests: list[Request] = []
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._handle, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        super().__init__(self.url)

    def _handle(self, environ: dict[str, Any], start_response: Any) -> Any:
        request = Request(
            environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"], environ.get("HTTP_RANGE", "")
        )
        self.requests.append(request)
        if self.intercept is None:
            return self._app(environ, start_response)
        answer = self.intercept(request, lambda: Response.from_app(self._app, environ, buffered=True))
        return answer(environ, start_response)

    @contextmanager
    def intercepting(self, intercept: Interceptor) -> Iterator[None]:
        """Intercept requests while the context is active."""
        self.intercept = intercept
        try:
            yield
        finally:
            self.intercept = None

    def clear(self) -> None:
        """Delete all objects and unfinished uploads, and forget all requests."""
        super().clear()
        self.requests.clear()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join(10)


def make_slow_down_response() -> Response:
    """Return the answer of a store that throttles."""
    body = "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    return Response(body, status=503, content_type="application/xml")


def make_denied_response(code: str = "ExpiredToken", status: int = 400) -> Response:
    """Return the answer of a store to credentials that are not valid."""
    return Response(f"<Error><Code>{code}</Code></Error>", status=status, content_type="application/xml")


class RandomFaults:
    """Interceptor that fails a share of all requests: throttled before, or the answer lost after they were executed."""

    def __init__(self, rate: float, seed: int, delay_s: float = 0.0) -> None:
        self._rate, self._random, self._lock, self._delay_s = rate, random.Random(seed), threading.Lock(), delay_s
        self.count = 0

    def __call__(self, request: Request, forward: Callable[[], Response]) -> Response:
        """Answer one request."""
        with self._lock:
            fails, is_lost = self._random.random() < self._rate, self._random.random() < 0.5
            self.count += fails
        if not fails:
            return forward()
        if is_lost:
            forward()
        time.sleep(self._delay_s)
        return make_slow_down_response()
