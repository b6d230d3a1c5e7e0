"""Connections to object stores through obstore, with bounded retries, and its errors as OSError."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any

from raytrain_hpc.errors import MissingDependencyError
from raytrain_hpc.storage.read_retry import FIRST_DELAY_S, MAX_DELAY_S, RETRY_TIMEOUT_S

URL_SCHEMES = ("s3", "gs", "az")
_VARIABLE_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_REQUEST_TIMEOUT = timedelta(seconds=30)
_CONNECT_TIMEOUT = timedelta(seconds=5)
# Throttling (503 SlowDown, 429), server errors and lost connections are retried with exponential, jittered delays.
# The time is the bound: the number of attempts would end them sooner if the random delays happen to be short.
_RETRY_CONFIG = {
    "max_retries": 40,
    "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
    "backoff": {
        "init_backoff": timedelta(seconds=FIRST_DELAY_S),
        "max_backoff": timedelta(seconds=MAX_DELAY_S),
        "base": 2,
    },
}
_ALLOW_HTTP_VARIABLES = ("AWS_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "AZURE_STORAGE_USE_HTTP")
_ERROR_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3}[^:\n]*)")


def open_bucket(scheme: str, bucket: str) -> Any:
    """Return the connection of this process to a bucket (for Azure: a container), opened at the first call.

    Credentials, region and endpoint come from the environment variables that the providers document (AWS_*, GOOGLE_*,
    AZURE_*), or from the machine's role. Raises OSError if they are not usable, MissingDependencyError without obstore.
    """
    variables = tuple(
        sorted((key, value) for key, value in os.environ.items() if key.startswith(_VARIABLE_PREFIXES[scheme]))
    )
    return _open_bucket(scheme, bucket, variables)


@lru_cache(maxsize=16)
def _open_bucket(scheme: str, bucket: str, variables: tuple[tuple[str, str], ...]) -> Any:
    """Open a connection; `variables`, the environment, is part of the key, so that new credentials are used."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise MissingDependencyError(f"{scheme}://{bucket}: needs obstore; run `pip install obstore`") from error
    is_http_allowed = any(os.environ.get(name, "").lower() in ("1", "true", "yes") for name in _ALLOW_HTTP_VARIABLES)
    options: Any = {"timeout": _REQUEST_TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT, "allow_http": is_http_allowed}
    retry: Any = _RETRY_CONFIG
    with translate_errors(f"{scheme}://{bucket}"):
        return from_url(f"{scheme}://{bucket}", client_options=options, retry_config=retry)


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Convert errors of obstore to OSError with the URL as `filename` and a short reason as `strerror`.

    FileNotFoundError: no such object or bucket. FileExistsError: a condition of the write did not hold.
    PermissionError: the credentials are missing, expired or not sufficient.
    """
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        reason = "there is no such bucket" if "NoSuchBucket" in str(error) else "there is no such object"
        raise FileNotFoundError(errno.ENOENT, reason, url) from error
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        raise FileExistsError(errno.EEXIST, "another writer was first", url) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, _describe(error), url) from error
    except exceptions.BaseError as error:
        if "NoSuchBucket" in str(error):
            raise FileNotFoundError(errno.ENOENT, "there is no such bucket", url) from error
        raise OSError(errno.EIO, _describe(error), url) from error


def _describe(error: Exception) -> str:
    """Return the server's status and error code, or the first line of the message."""
    text = str(error)
    status, code = _STATUS.search(text), _ERROR_CODE.search(text)
    if status is None:
        return text.partition("\n")[0].strip()
    return status[1].strip() + (f" ({code[1]})" if code else "")
