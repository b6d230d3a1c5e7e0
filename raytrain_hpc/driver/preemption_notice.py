"""Notice of a cloud that this machine will be reclaimed: a file that appears, or an HTTP endpoint that answers."""

from __future__ import annotations

import logging
import os
import threading
import urllib.request
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit

from raytrain_hpc.config.schema import Config

_log = logging.getLogger(__name__)
_POLL_INTERVAL_S = 1.0
_REQUEST_TIMEOUT_S = 2.0
_MAX_BODY_BYTES = 256
_TOKEN_TTL_S = 21600
_NOT_PREEMPTED = {b"FALSE", b"NONE", b"NULL"}


class PreemptionEndpoint:
    """Metadata endpoint of an instance, in the forms that AWS and Google Cloud have.

    AWS answers spot/instance-action with 404 until the instance is to be reclaimed. Google Cloud answers
    instance/preempted with FALSE or TRUE.
    """

    def __init__(self, url: str):
        self._url = url
        self._headers = {"Metadata-Flavor": "Google"}  # which Google Cloud demands, and others ignore
        # Link-local addresses must not be asked for through a proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def is_preempted(self) -> bool:
        """Return whether the machine will be reclaimed. Raises OSError if the endpoint does not say so."""
        try:
            return self._request()
        except HTTPError as error:
            if error.code != HTTPStatus.UNAUTHORIZED:
                raise
        self._headers["X-aws-ec2-metadata-token"] = self._request_token()
        return self._request()

    def _request(self) -> bool:
        request = urllib.request.Request(self._url, headers=self._headers)
        try:
            with self._opener.open(request, timeout=_REQUEST_TIMEOUT_S) as response:
                body: bytes = response.read(_MAX_BODY_BYTES)
        except HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return False
            raise
        return body.strip().upper() not in _NOT_PREEMPTED

    def _request_token(self) -> str:
        """Return a session token, without which version 2 of AWS's metadata service answers 401."""
        parts = urlsplit(self._url)
        request = urllib.request.Request(
            f"{parts.scheme}://{parts.netloc}/latest/api/token",
            method="PUT",
            headers={"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)},
        )
        with self._opener.open(request, timeout=_REQUEST_TIMEOUT_S) as response:
            token: bytes = response.read(_MAX_BODY_BYTES)
        return token.decode()


class PreemptionNotice:
    """Watcher of `cluster.preemption_file` and `cluster.preemption_url` on this machine, in a thread if one is set."""

    def __init__(self, config: Config):
        path, url = config.cluster.preemption_file, config.cluster.preemption_url
        self._path = Path(os.path.expandvars(path)).expanduser() if path else None
        self._endpoint = PreemptionEndpoint(url) if url else None
        self._announced, self._closed = threading.Event(), threading.Event()
        self._has_warned = False
        if path or url:
            threading.Thread(target=self._run, name="preemption", daemon=True).start()

    @property
    def is_announced(self) -> bool:
        """Whether the machine will be reclaimed. Once announced, it stays so."""
        return self._announced.is_set()

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._has_come():
            if self._closed.wait(_POLL_INTERVAL_S):
                return
        self._announced.set()

    def _has_come(self) -> bool:
        try:
            if self._path is not None and self._path.exists():
                return True
            return self._endpoint is not None and self._endpoint.is_preempted()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the preemption notice of this node cannot be read: %s; trying again", error)
            return False
