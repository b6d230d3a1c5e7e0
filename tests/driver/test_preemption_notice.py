"""Preemption notices of a machine: files, and endpoints that answer like those of AWS and Google Cloud."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.node_agent import NodeAgent
from raytrain_hpc.driver.preemption_notice import PreemptionEndpoint
from raytrain_hpc.errors import ConfigError
from tests.driver.cli_process import wait_until

TOKEN = "the-token"


class MetadataServer(ThreadingHTTPServer):
    """A metadata service. Paths: /google and /aws answer as those clouds do, /broken with 500."""

    is_preempted = False


class MetadataHandler(BaseHTTPRequestHandler):
    server: MetadataServer

    def do_GET(self) -> None:
        preempted, path = self.server.is_preempted, self.path
        if path == "/google":
            has_header = self.headers["Metadata-Flavor"] == "Google"
            self._reply(200 if has_header else 403, b"TRUE\n" if preempted else b"FALSE\n")
        elif path == "/aws" and self.headers["X-aws-ec2-metadata-token"] != TOKEN:
            self._reply(401)
        elif path == "/aws" and preempted:
            self._reply(200, b'{"action": "terminate", "time": "2026-11-26T19:00:00Z"}')
        else:
            self._reply(500 if path == "/broken" else 404)

    def do_PUT(self) -> None:
        is_valid = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._reply(200 if is_valid else 400, TOKEN.encode())

    def _reply(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[MetadataServer]:
    server = MetadataServer(("127.0.0.1", 0), MetadataHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def make_url(service: MetadataServer, path: str) -> str:
    return f"http://127.0.0.1:{service.server_port}/{path}"


@pytest.mark.parametrize("cloud", ["aws", "google"])
def test_an_endpoint_announces_the_preemption(service: MetadataServer, cloud: str) -> None:
    endpoint = PreemptionEndpoint(make_url(service, cloud))
    assert not endpoint.is_preempted()
    service.is_preempted = True
    assert endpoint.is_preempted()


def test_an_endpoint_that_fails_announces_nothing(service: MetadataServer) -> None:
    with pytest.raises(HTTPError):
        PreemptionEndpoint(make_url(service, "broken")).is_preempted()
    with pytest.raises(OSError):
        PreemptionEndpoint("http://127.0.0.1:1/").is_preempted()


@pytest.mark.parametrize("source", ["file", "url"])
def test_the_agent_of_a_node_reports_the_notice(
    service: MetadataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("NOTICE_NAME", "notice")
    words = {"file": f"cluster.preemption_file={tmp_path}/$NOTICE_NAME"}
    words["url"] = f"cluster.preemption_url={make_url(service, 'aws')}"
    agent = NodeAgent(load_config(None, [words[source]]))
    try:
        assert not agent.get_health().is_preempted
        service.is_preempted = True
        (tmp_path / "notice").touch()
        wait_until(lambda: agent.get_health().is_preempted, timeout_s=10)
        (tmp_path / "notice").unlink()
        assert agent.get_health().is_preempted, "an announcement is not taken back"
    finally:
        agent.close()


@pytest.mark.parametrize("word", ["cluster.preemption_url=169.254.169.254/latest", "cluster.preemption_file=notice"])
def test_wrong_sources_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        load_config(None, [word])
