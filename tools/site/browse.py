"""Open every page of a built site in a headless Chromium: pictures must load, no script may fail, the search must find.

    python -m tools.site.browse site

A page made here opens the pages of the site one after another in a frame, and writes what it saw into its own document,
which ``chromium --dump-dom`` prints. Without a Chromium the command says so and ends with status 0.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SEARCHED = {"hysteresis": "fp16.html", "mxfp8": "names.html"}
"""A word, and a page that the search must list for it."""
PROBE = "browse-probe.html"
SCRIPT = """<!doctype html><meta charset="utf-8"><title>probe</title>
<iframe id="frame" style="width:1280px;height:2000px"></iframe><pre id="seen"></pre>
<script>
const pages = PAGES, searched = SEARCHED, frame = document.getElementById("frame"), seen = {pages: {}, search: {}};
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
async function look() {
  for (const page of pages) {
    const view = await open(page);
    const errors = [];
    view.addEventListener("error", event => errors.push(String(event.message)));
    const pictures = [...view.document.images];
    pictures.forEach(picture => picture.loading = "eager");
    await Promise.all(pictures.map(picture => picture.decode().catch(() => null)));
    seen.pages[page] = {
      title: view.document.title, heading: view.document.querySelector("h1")?.innerText ?? "", errors: errors,
      pictures: pictures.map(picture => [picture.getAttribute("src"), picture.naturalWidth, picture.clientWidth]),
    };
  }
  for (const word of searched) seen.search[word] = await search(word);
}
look().catch(error => seen.failed = String(error)).finally(() => {
  document.getElementById("seen").textContent = JSON.stringify(seen);
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
        found += [f"{page}: {src} is not drawn" for src, width, drawn in entry["pictures"] if not width or not drawn]
    for word, page in SEARCHED.items():
        if not any(page in address for address in seen["search"].get(word, [])):
            found.append(f"search: {word!r} does not find {page}")
    return found


def browse(site: Path, browser: str, pages: Sequence[str]) -> dict:
    """Return what the browser saw of the pages, served on a free port of this machine.

    Raises:
        RuntimeError: the browser wrote no result.
    """
    probe = site / PROBE
    probe.write_text(SCRIPT.replace("PAGES", json.dumps(list(pages))).replace("SEARCHED", json.dumps(list(SEARCHED))))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with tempfile.TemporaryDirectory() as profile:
            done = subprocess.run(
                [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
                 "--virtual-time-budget=300000", "--timeout=300000", "--dump-dom",
                 f"http://127.0.0.1:{server.server_port}/{PROBE}"],
                capture_output=True, text=True, timeout=600, check=False,
            )  # fmt: skip
    finally:
        server.shutdown()
        probe.unlink()
    written = re.search(r'<pre id="seen">(.+?)</pre>', done.stdout, flags=re.DOTALL)
    if written is None:
        raise RuntimeError(f"{browser} wrote no result; exit status {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(unescape(written[1]))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print no line per request."""


def main(argv: Sequence[str]) -> int:
    """Print the faults, and return 1 if there are any."""
    (folder,) = argv
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"not opened in a browser: none of {', '.join(BROWSERS)} is installed")
        return 0
    site = Path(folder)
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
    found = faults(browse(site, browser, pages), pages)
    print("\n".join(found) or f"{browser}: opened {len(pages)} pages, saw every picture, and searched")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
