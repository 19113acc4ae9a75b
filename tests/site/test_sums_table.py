"""The table of layers that lose to the sums of Hopper shows the committed figures."""

import json

from tests.site.pages import DOCS

LAYERS = DOCS.parent / "benchmarks" / "results" / "cpu-2026-11-26" / "sums" / "layers.json"
LOST = 1.0
"""A layer is listed if it loses more, in dB."""


def test_the_table_shows_every_layer_that_loses_more_than_1_db():
    rows = json.loads(LAYERS.read_text())
    wanted = []
    for row in sorted((row for row in rows if row["lost"] > LOST), key=lambda row: -row["lost"]):
        layer = ".".join(row["layer"].split(".")[-2:])
        noise = [f"{row[name]:.0f} dB" for name in ("rounding", "fast", "promoted")]
        wanted.append([row["architecture"], layer, f"{row['k']:,}", row["weights"], *noise, f"{row['lost']:.1f} dB"])
    page = (DOCS / "how-it-works.md").read_text().split("### Layers of 20 architectures")[1].split("\n#")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    assert table[2:] == wanted
    for weights in ("random", "uneven"):
        lost = [row["lost"] for row in rows if row["weights"] == weights]
        most = max(loss for loss in lost if loss <= LOST)
        more = sum(loss > LOST for loss in lost)
        said = f"{weights} weights {more} of {len(lost)} layers lose more than 1 dB, the others at most {most:.2f} dB."
        assert said in page
