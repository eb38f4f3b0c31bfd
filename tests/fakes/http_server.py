"""One HTTP server whose answers a test scripts: a webhook, a judge, the API of a cluster."""

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status, JSON body, and headers if there are any."""


class HttpServer:
    """Subclasses say what it answers. ``tls``: files of its certificate and key."""

    def __init__(self, tls: tuple[Path, Path] | None = None) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def reply(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, answer, *headers = outer.answer(self, body)
                self.send_response(status)
                for header in (h for some in headers for h in some.items()):
                    self.send_header(*header)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            do_GET = do_POST = do_PATCH = reply

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, asked: BaseHTTPRequestHandler, body: bytes) -> Answer:
        """Called in a thread of the request. ``asked`` has its command, path and headers."""
        raise NotImplementedError

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
