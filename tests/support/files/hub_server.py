"""A stand-in for the Hugging Face Hub on the loopback address.

It answers only the requests that the Hub's client makes.
"""

import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import threading
import urllib.parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: dict[str, pathlib.Path]
    asked: list[str]

    def log_message(self, *_):
        """Keep quiet."""

    def _send(self, body=b"", status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, code, status=404):
        self._send(b"{}", status, X_Error_Code=code, Content_Type="application/json")

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        self.asked.append(f"{self.command} {path}")
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = found or file
        if match is None or match[1] not in self.repositories:
            return self._refuse("GatedRepo" if match and "gated" in match[1] else "RepoNotFound")
        folder = self.repositories[match[1]]
        if (found[3] if found else file[2]) not in ("main", "v1", COMMIT):
            return self._refuse("RevisionNotFound")
        if found:
            return self._describe(folder, found)
        body = (folder / file[3]).read_bytes()
        etag = hashlib.sha256(body).hexdigest()
        return self._send(body, ETag=f'"{etag}"', X_Repo_Commit=COMMIT)

    def _describe(self, folder, found):
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        names = [p.relative_to(folder).as_posix() for p in files]
        if found[2] == "revision":
            siblings = [{"rfilename": name} for name in names]
            answer = {"id": found[1], "sha": COMMIT, "siblings": siblings}
        else:
            answer = [
                {"type": "file", "path": name, "size": p.stat().st_size, "oid": "0" * 40}
                for name, p in zip(names, files, strict=True)
            ]
        return self._send(json.dumps(answer).encode(), Content_Type="application/json")


@contextlib.contextmanager
def serve(**repositories):
    """Serve folders as repositories ``owner/NAME``; yield the address and the list of requests."""
    asked: list[str] = []
    known = {f"owner/{name}": folder for name, folder in repositories.items()}
    handler = type("Handler", (_Handler,), {"repositories": known, "asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
