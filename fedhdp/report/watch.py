"""A run under way as a page that refreshes itself: a small server for this machine.

It answers two addresses, the page and its version. No file is served. On a loopback address, requests that name another
host are refused, so that no page of another site can read the numbers.
"""

from __future__ import annotations

import html
import ipaddress
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedhdp.errors import FedHDPError, RunError
from fedhdp.report.run_page import run_page
from fedhdp.results.store import EXPERIMENT_FILE, HISTORY_FILE, RUNS_FILE, SUMMARY_FILE

VERSION_PATH = "/version"


class WatchServer(ThreadingHTTPServer):
    """The server of one directory.

    Args:
        directory: The run's directory.
        address: Host and port.

    Raises:
        RunError: If it cannot listen there.
    """

    daemon_threads = True

    def __init__(self, directory: Path, address: tuple[str, int]):
        self.directory = directory
        self._lock, self._page = threading.Lock(), ("", "")
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            message = f"--port {address[1]} of {address[0]} cannot be used ({error.strerror}); name another"
            raise RunError(message, "--port", address[1]) from error

    @property
    def url(self) -> str:
        """The page's address."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return _is_loopback(str(self.server_address[0]))

    def version(self) -> str:
        """A text that changes with the run's files."""
        files = (file for name in (HISTORY_FILE, SUMMARY_FILE) for file in self.directory.rglob(name))
        states = (file.stat() for file in sorted(files))
        return "-".join(f"{state.st_mtime_ns:x}.{state.st_size:x}" for state in states) or "empty"

    def page(self) -> str:
        """The page of the run as it is now; made once for each version."""
        with self._lock:
            version = self.version()
            if version != self._page[0]:
                self._page = version, _page_or_wait(self.directory, version)
            return self._page[1]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_server(directory: Path, host: str = "127.0.0.1", port: int = 0) -> WatchServer:
    """A server of a run's page, which ``serve_forever`` starts.

    Args:
        directory: The directory of a run, of several runs, or of a deployment.
        host: The address to listen on.
        port: The port; 0: any that is free.

    Raises:
        RunError: If the directory has no run, or the address cannot be used.
    """
    if not (directory / EXPERIMENT_FILE).is_file() and not (directory / RUNS_FILE).is_file():
        message = f"{directory} has no run: it has neither {EXPERIMENT_FILE} nor {RUNS_FILE}"
        raise RunError(message, "DIR", str(directory))
    return WatchServer(directory, (host, port))


def _page_or_wait(directory: Path, version: str) -> str:
    """The page, or one that waits for the first measurements."""
    try:
        return run_page([directory], refresh=VERSION_PATH, version=version)
    except FedHDPError as error:
        reason = "nothing is measured yet" if type(error) is RunError else str(error)
        words = html.escape(f"{directory.name}: {reason}")
        head = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>fedhdp</title>'
        return f"{head}<p>{words}</p>"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version, sys_version = "fedhdp", ""

    def do_GET(self) -> None:
        """Answer the page, its version, or nothing."""
        if self.server.is_local and not _is_loopback(self._host()):  # another site's name that leads here
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._send(self.server.page(), "text/html")
        elif self.path == VERSION_PATH:
            self._send(self.server.version(), "text/plain")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _host(self) -> str:
        host = self.headers.get("Host", "")
        return host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]

    def _send(self, content: str, kind: str) -> None:
        body = content.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""
