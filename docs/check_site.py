"""Check the built site: python docs, and then python docs/check_site.py.

It fails on these faults, and names the page of each:

- a link inside the site to a page, a file or a section that is not there;
- an en dash that was a hyphen of an option, a link to a mail address, a title that is the path of a
  module, or text that a theme puts in place of a setting;
- a code fence without a language in README, CONTRIBUTING or a guide;
- a page that is wider than a window of `WIDTH` pixels, which a phone would scroll sideways.

The last check needs Chromium. It loads all pages into one frame, so that they take one process.
"""

import contextlib
import html.parser
import http.server
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator, Mapping

import pages

SITE = pages.ROOT / "build" / "docs" / "html"
WIDTH = 390  # pixels, as a phone has
_SECONDS = 300  # until the browser must have measured all pages
_HARNESS = "__widths__"  # address of the page that measures the others
# Faults of text -> what finds them in the text of a page.
_TEXTS = {
    "an en dash in place of a hyphen": re.compile(r"(?:^|\s)(\u2013[a-zA-Z][\w-]*)"),
    "a setting that is not set": re.compile(r"(By Author name not set)"),
}
_MODULE = re.compile(r"[a-z_]+(\.[a-z_]+)+")
_HIDDEN = ("script", "style", "template")


class Page(html.parser.HTMLParser):
    """What the checks read of an HTML page.

    Attributes:
      ids: names of its sections.
      links: addresses that it links to or loads.
      title: its first heading.
      text: its text, without scripts.
    """

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links, self.title, self.text = set(), [], "", ""
        self._inside, self._headings = [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Store the sections and the links of a tag."""
        named = dict(attrs)
        self.ids |= {named[key] for key in ("id", "name") if named.get(key)}
        self.links += [named[key] for key in ("href", "src") if named.get(key)]
        self._headings += tag == "h1"
        if tag in (*_HIDDEN, "h1"):
            self._inside.append(tag)

    def handle_endtag(self, tag):
        """Leave a heading or a script."""
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data):
        """Store text."""
        if not self._inside:
            self.text += data
        elif self._inside[-1] == "h1" and self._headings == 1:
            self.title += data


def read_pages(site: pathlib.Path) -> dict[str, Page]:
    """Return the pages of a site by their paths."""
    return {
        path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
        if "_static" not in path.parts
    }


def find_broken_links(site: pathlib.Path, found: Mapping[str, Page]) -> Iterator[str]:
    """Yield the links to pages, files and sections that are not there."""
    for name, page in found.items():
        for link in page.links:
            address = urllib.parse.urlsplit(link)
            if address.scheme == "mailto":
                yield f"{name}: link to a mail address: {link}"
            if address.scheme or address.netloc:
                continue
            path = urllib.parse.unquote(address.path)
            target = os.path.normpath(os.path.join(os.path.dirname(name), path)) if path else name
            if not (site / target).is_file():
                yield f"{name}: broken link: {link}"
            elif target in found and not _has_section(found[target], address.fragment):
                yield f"{name}: link to a section that is not there: {link}"


def _has_section(page, fragment):
    return not fragment or urllib.parse.unquote(fragment) in page.ids


def find_wrong_texts(found: Mapping[str, Page]) -> Iterator[str]:
    """Yield texts and titles that no author wrote in this way."""
    for name, page in found.items():
        for fault, pattern in _TEXTS.items():
            yield from (f"{name}: {fault}: {match}" for match in pattern.findall(page.text))
        title = page.title.rstrip("#\n ")
        if _MODULE.fullmatch(title):
            yield f"{name}: the title is the path of a module: {title}"


def find_untagged_fences(root: pathlib.Path, paths) -> Iterator[str]:
    """Yield the code fences without a language in Markdown files."""
    for path in paths:
        opened = None
        for number, line in enumerate((root / path).read_text(encoding="utf-8").splitlines(), 1):
            fence = re.match(r"\s*(`{3,})(.*)", line)
            if fence is None:
                continue
            if opened is None:
                opened = fence[1]
                if not fence[2].strip():
                    yield f"{path}:{number}: code fence without a language"
            elif fence[1] == opened and not fence[2].strip():
                opened = None


# The frame has the width of a phone, and so the rules of the style sheets for a phone apply. A
# page that a reader can scroll sideways is wider than its frame.
_MEASURE = """<!doctype html><title>widths</title>
<body style="margin:0"><iframe id="frame" style="width:%(width)dpx;height:800px;border:0"></iframe>
<script>
const names = %(names)s, frame = document.getElementById("frame"), found = {};
function load(name) {
  return new Promise(done => { frame.onload = done; frame.src = "/" + name; });
}
function widest(inside) {
  const elements = [...inside.querySelectorAll("main *")];
  const over = elements.filter(e => e.getBoundingClientRect().right > %(width)d + 1 && !boxed(e));
  const text = e => e.textContent.trim().replace(/\\s+/g, " ").slice(0, 60);
  return over.slice(0, 3).map(e => e.tagName.toLowerCase() + ": " + text(e));
}
function boxed(element) { // whether a box around it scrolls, or cuts it off
  for (let e = element.parentElement; e.tagName !== "MAIN"; e = e.parentElement) {
    if (getComputedStyle(e).overflowX !== "visible") return true;
  }
  return false;
}
(async () => {
  for (const name of names) {
    await load(name);
    const inside = frame.contentDocument, root = inside.scrollingElement;
    const width = Math.max(root.scrollWidth, inside.body.scrollWidth);
    found[name] = [width, width > %(width)d ? widest(inside) : []];
  }
  await fetch("/", {method: "POST", body: JSON.stringify(found)});
})();
</script></body>"""


def _handler(site, page, results):
    """Return a class that serves a site and the measuring page, and takes the results."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(site))

        def do_GET(self):
            if self.path != f"/{_HARNESS}":
                return super().do_GET()
            self._answer(page.encode())

        def do_POST(self):
            results.put(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(b"")

        def _answer(self, body):
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    return Handler


@contextlib.contextmanager
def serve(site: pathlib.Path, page: str, results: queue.Queue) -> Iterator[str]:
    """Serve a site and one more page on this machine alone; yield the address of that page."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(site, page, results))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{_HARNESS}"
    finally:
        server.shutdown()
        server.server_close()


def find_browser() -> str:
    """Return the path of Chromium.

    Raises:
      FileNotFoundError: it is not installed.
    """
    path = shutil.which("chromium")
    if path is None:
        raise FileNotFoundError("chromium: not installed; on Debian, run apt-get install chromium")
    return path


def measuring_page(names, width: int) -> str:
    """Return the HTML that loads each page into a frame of `width` pixels, and posts the widths."""
    return _MEASURE % {"width": width, "names": json.dumps(list(names))}


def measure_widths(site: pathlib.Path, names, width: int = WIDTH) -> dict[str, list]:
    """Return the width of each page in a window of `width` pixels, and what is wider than it."""
    results = queue.Queue()
    page = measuring_page(names, width)
    # Processes of the browser may still write when the first one has ended.
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with serve(site, page, results) as address, folder as profile:
        # Chromium refuses to run as root with its sandbox. The pages are this repository's own.
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command = [find_browser(), *options, f"--user-data-dir={profile}"]
        command += ["--remote-debugging-port=0", address]  # without it, Chromium ends at once
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        browser = subprocess.Popen(command, **silent)
        try:
            return json.loads(results.get(timeout=_SECONDS))
        finally:
            browser.terminate()
            browser.wait()


def find_wide_pages(site: pathlib.Path, names) -> Iterator[str]:
    """Yield the pages that are wider than a phone."""
    for name, (width, wide) in measure_widths(site, names).items():
        if width > WIDTH:
            yield f"{name}: {width} pixels wide in a window of {WIDTH}: {'; '.join(wide)}"


def main() -> int:
    """Print all faults; return 1 if there are any."""
    found = read_pages(SITE)
    faults = [
        *find_broken_links(SITE, found),
        *find_wrong_texts(found),
        *find_untagged_fences(pages.ROOT, ("README.md", "CONTRIBUTING.md", *pages.GUIDES)),
        *find_wide_pages(SITE, found),
    ]
    print("\n".join(faults or [f"ok: {len(found)} pages"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
