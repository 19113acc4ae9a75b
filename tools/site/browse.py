"""Open every page of a built site in a headless Chromium, as wide as on a desktop and as narrow as on a phone.

    python -m tools.site.browse site

Every picture must load and be visible, no page may be wider than its window, no name in a table may break, no script
may fail, and the search must find. A page made here opens the pages of the site one after another in a frame, and sends
what it saw to the server of this command. Without a Chromium the command says so and ends with status 0, or with status
1 where ``CI`` is set.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any
from urllib.parse import urlsplit

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SEARCHED = {"hysteresis": "master-weights.html", "mxfp8": "names.html"}
"""A word, and a page that the search must list for it."""
WIDTHS = {"desktop": 1280, "phone": 390}
"""Widths of the window, in CSS pixels."""
PROBE = "browse-probe.html"
SECONDS = 300
NOTED = b"<head><script>failed = []; addEventListener('error', event => failed.push(String(event.message)))</script>"
"""Goes into every page before its own scripts, and notes those that fail."""
SCRIPT = """<!doctype html><meta charset="utf-8"><title>probe</title>
<iframe id="frame" style="width:1280px;height:2000px;border:0"></iframe>
<script>
const pages = PAGES, searched = SEARCHED, widths = WIDTHS;
const frame = document.getElementById("frame"), seen = {pages: {}, search: {}};
const wait = milliseconds => new Promise(done => setTimeout(done, milliseconds));
const open = page => new Promise(done => { frame.onload = () => done(frame.contentWindow); frame.src = page; });
async function search(word) {
  const view = await open("index.html?for=" + word);
  const input = view.document.querySelector("[data-md-component=search-query]");
  input.focus(); input.value = word; input.dispatchEvent(new view.Event("keyup", {bubbles: true}));
  for (let tries = 0; tries < 100; tries++) {
    await wait(100);
    const found = [...view.document.querySelectorAll(".md-search-result__link")].map(link => link.getAttribute("href"));
    if (found.length) return found;
  }
  return [];
}
function isVisible(picture, view) {
  const box = picture.getBoundingClientRect();
  const shown = picture.checkVisibility({opacityProperty: true, visibilityProperty: true});
  return shown && box.width > 0 && box.height > 0 && box.right > 0 && box.left < view.innerWidth;
}
async function look() {
  for (const page of pages) {
    const view = await open(page);
    const pictures = [...view.document.images];
    pictures.forEach(picture => picture.loading = "eager");
    await Promise.all(pictures.map(picture => picture.decode().catch(() => null)));
    const entry = seen.pages[page] = {
      title: view.document.title, heading: view.document.querySelector("h1")?.innerText ?? "",
      pictures: {}, wider: {}, broken: {},
    };
    for (const [name, width] of Object.entries(widths)) {
      frame.style.width = width + "px";
      await wait(30);
      entry.pictures[name] = pictures.map(
        picture => [picture.getAttribute("src"), picture.naturalWidth, isVisible(picture, view)]);
      entry.wider[name] = view.document.documentElement.scrollWidth - view.innerWidth;
      entry.broken[name] = [...view.document.querySelectorAll("td .name")]
        .filter(word => word.getClientRects().length > 1).map(word => word.innerText);
    }
    entry.errors = view.failed;
    frame.style.width = widths.desktop + "px";
  }
  for (const word of searched) seen.search[word] = await search(word);
}
look().catch(error => seen.failed = String(error)).finally(() => {
  fetch("browse-seen", {method: "POST", body: JSON.stringify(seen)});
});
</script>
"""


def faults(seen: dict, pages: Sequence[str]) -> list[str]:
    """Return a line for every fault in what the browser saw."""
    found = [f"the probe failed: {seen['failed']}"] if "failed" in seen else []
    for page in pages:
        entry = seen["pages"].get(page)
        if entry is None or not entry["heading"]:
            found.append(f"{page}: does not open")
            continue
        found += [f"{page}: {error}" for error in entry["errors"]]
        for name, pictures in entry["pictures"].items():
            found += [f"{page}: {src} does not load" for src, width, _ in pictures if not width]
            found += [
                f"{page}: {src} is not visible on a {name}" for src, width, shown in pictures if width and not shown
            ]
        found += [f"{page}: {word} is broken on a {name}" for name, words in entry["broken"].items() for word in words]
        found += [f"{page}: {by} pixels too wide on a {name}" for name, by in entry["wider"].items() if by > 0]
    for word, page in SEARCHED.items():
        if not any(page in address for address in seen["search"].get(word, [])):
            found.append(f"search: {word!r} does not find {page}")
    return found


def browse(site: Path, browser: str, pages: Sequence[str]) -> dict:
    """Return what the browser saw of the pages, served on a free port of this machine.

    Raises:
        RuntimeError: the browser ended, or sent nothing within ``SECONDS``.
    """
    filled = {"PAGES": list(pages), "SEARCHED": list(SEARCHED), "WIDTHS": WIDTHS}
    probe = re.sub("PAGES|SEARCHED|WIDTHS", lambda name: json.dumps(filled[name[0]]), SCRIPT)
    seen: Queue[dict] = Queue()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Site, str(site), probe, seen))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/{PROBE}"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        running = subprocess.Popen(
            [browser, *options, f"--user-data-dir={profile}", "--remote-debugging-port=0", address],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return seen.get(timeout=SECONDS)
        except Empty:
            raise RuntimeError(f"{browser} sent nothing; exit status {running.poll()}.") from None
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            server.shutdown()
            server.server_close()


class _Site(SimpleHTTPRequestHandler):
    """Serve the folder and the probe, and take what the probe sends."""

    def __init__(self, folder: str, probe: str, seen: Queue[dict], *args: Any) -> None:
        self.probe, self.seen = probe.encode(), seen
        super().__init__(*args, directory=folder)

    def do_GET(self) -> None:
        name = urlsplit(self.path).path
        if not name.endswith(".html"):
            super().do_GET()
            return
        page = Path(self.translate_path(name))
        body = self.probe if name == f"/{PROBE}" else page.read_bytes().replace(b"<head>", NOTED, 1)
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.seen.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print no line per request."""


def main(argv: Sequence[str]) -> int:
    """Print the faults, and return 1 if there are any."""
    (folder,) = argv
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"not opened in a browser: none of {', '.join(BROWSERS)} is installed")
        return int(os.environ.get("CI", "") not in ("", "0", "false"))
    site = Path(folder)
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
    found = faults(browse(site, browser, pages), pages)
    print(
        "\n".join(found)
        or f"{browser}: opened {len(pages)} pages, saw every picture on desktop and phone, and searched"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
