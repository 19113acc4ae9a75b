"""Pages and links lead somewhere; tables of names and options, YAML and output on the pages are those of the code."""

import json
import logging
import re
from dataclasses import fields
from importlib import import_module
from inspect import signature
from statistics import mean, stdev

import lightning as L
import pytest
import torch
import yaml

from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO, FSDP2Strategy, LossScale
from lightning_lowprec.conversion.name_formats import families
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.numerics.tensor_cores import UNITS
from lightning_lowprec.tools import cli
from lightning_lowprec.tools.demo import ByteGPT
from lightning_lowprec.tools.planning.costs import Weights, all_reduce, step
from tests.representatives import TABLE
from tests.site.pages import DOCS, PAGES, ROOT, Block, blocks
from tools.site import hooks, notebook, pictures


class _Loader(yaml.SafeLoader):
    """Read mkdocs.yml, whose tags name functions of Python."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
_Loader.add_constructor("!relative", lambda loader, node: str(node.value))
MKDOCS = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def _leaves(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [leaf for child in (entry.values() if isinstance(entry, dict) else entry) for leaf in _leaves(child)]


def test_the_navigation_has_every_page_once():
    assert sorted(_leaves(MKDOCS["nav"])) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def anchors(text: str) -> set[str]:
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_every_link_leads_somewhere(page: str):
    path = ROOT / page
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", path.read_text()):
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), f"{page}: {target}"
        assert DOCS not in path.parents or DOCS in found.parents, f"{page}: {target} is not on the site"
        if anchor:
            assert anchor in anchors(found.read_text()), f"{page}: {target}#{anchor}"


def test_one_page_says_what_has_run_and_the_others_show_its_box():
    saying = r"(?i)no gpu has|not run on a gpu|kernels have not run|nccl has not run|has been (?:timed|measured)"
    pages = {page: (ROOT / page).read_text() for page in PAGES if page != "README.md"}
    assert [page for page, text in pages.items() if re.search(saying, text)] == ["docs/what-runs-where.md"]
    boxes = [text for text in pages.values() if "<!-- status -->" in text]
    line = "<!-- status -->\n[What has run](what-runs-where.md#what-has-run).\n<!-- /status -->\n"
    assert len(boxes) >= 8
    assert all(text.count("<!-- status -->") == text.count(line) == 1 for text in boxes)
    assert "    No GPU has run this package yet" in hooks.on_page_markdown(boxes[0], page=None)


def test_the_table_of_fsdp2_lists_every_option_with_its_default():
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", (DOCS / "fsdp2.md").read_text(), flags=re.MULTILINE)
    listed = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names) if name not in TABLE}
    options = {field.name: field.default for field in fields(ShardOptions)}
    arguments = set(signature(FSDP2Strategy).parameters) - {"options"}
    assert arguments == set(signature(FabricFSDP2Strategy).parameters) - {"options"}
    assert set(listed) == set(options) | arguments
    for name, default in options.items():
        assert f"`{default!r}`".replace("'", '"') in listed[name], name


def test_the_table_of_torchao_has_true_defaults():
    text = (DOCS / "torchao.md").read_text().split("## Options")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", text, flags=re.MULTILINE)
    parameters = signature(FP8TorchAO).parameters
    for names, defaults in rows:
        names = re.findall(r"`(\w+)`", names)
        assert set(names) <= set(parameters)
        shown = re.findall(r"`([^`]+)`", defaults)
        for name, default in zip(names, shown, strict=False):
            assert repr(parameters[name].default).replace("'", '"') == default, name


def test_the_table_of_loss_scaling_lists_every_option_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", (DOCS / "master-weights.md").read_text(), flags=re.MULTILINE)
    assert dict(rows) == {field.name: repr(field.default) for field in fields(LossScale)}


NAMES = (DOCS / "names.md").read_text()


def test_the_table_lists_exactly_the_registered_names():
    rows = re.findall(r"^\| (`.*?) \|", NAMES, flags=re.MULTILINE)
    listed = [name for row in rows if "precision=" not in row for name in re.findall(r"`([^`]+)`", row)]
    suffixes = {name for name in listed if name.startswith("-")}
    assert sorted({*listed} - suffixes) == sorted(name for stems in families(TABLE).values() for name in stems)
    assert suffixes == {suffix for found in families(TABLE) for suffix in found} - {"-fp16"}  # two names have it


TEXT = [block for block in blocks("text") if block.page in ("README.md", "docs/getting-started.md")]
LOG = [block for block in TEXT if block.code.startswith("fp8-hybrid: ")]


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_the_yaml_makes_an_object(block: Block):
    entry = yaml.safe_load(block.code)["trainer"]["plugins"]
    module, _, name = entry["class_path"].rpartition(".")
    assert getattr(import_module(module), name)(**entry["init_args"])


def test_the_log_line_is_what_a_set_up_says(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        L.Fabric(accelerator="cpu", precision="fp8-hybrid").setup_module(ByteGPT())
    assert len(LOG) == 2
    assert {block.code.strip() for block in LOG} <= set(caplog.messages)


def test_the_excerpt_of_plan_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", "llama"]) == 0
    printed = capsys.readouterr().out.splitlines()
    (excerpt,) = [block.code for block in TEXT if block.code.startswith("layer ")]
    assert set(excerpt.splitlines()) <= set(printed)


# ---- figures of the formats, of the units, of the committed runs, and of the formulas

PAGE = (DOCS / "how-it-works.md").read_text()
RESULTS = DOCS.parent / "benchmarks" / "results"


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn", "int8"])
def test_the_table_of_formats(name):
    bits, largest, smallest = re.search(
        rf"^\| `{name}` \| (.+?) \| (.+?) \| (.+?) \|", PAGE, flags=re.MULTILINE
    ).groups()
    grid = pictures.values(name)
    assert float(largest) == grid.max()
    assert (2.0 ** int(smallest[2:]) if "^" in smallest else float(smallest)) == grid[grid > 0].min()
    if name.startswith("float"):
        assert re.search(r"e(\d)m(\d)", name).groups() == tuple(bits.split(", "))


@pytest.mark.slow
@pytest.mark.parametrize("row", re.findall(r"\n\| ([^|]+) \| ([\d,]+) \| (\d+) dB \| (.*) \| (\d+) dB \|", PAGE))
def test_the_table_of_sums_says_what_is_computed(row):
    data, k, of_rounding, fast, of_promoted = row
    rounding, of_fast, promoted, slope = pictures.lost_on_hopper(data, int(k.replace(",", "")))
    assert (f"{rounding:.0f}", f"{promoted:.0f}") == (of_rounding, of_promoted)
    loss = f", {-100 * slope:.1f} % too small" if slope < -0.01 else ""
    assert fast.replace("*", "") == f"{of_fast:.0f} dB{loss}"


def test_the_table_of_gpus_is_the_table_of_units():
    rows = re.findall(r'\n\| `"(\w+)"` \| [^|]+ \| (\d+)[^|]* \| (\d+)', PAGE)
    assert rows == [(name, str(unit.block), str(unit.places)) for name, unit in UNITS.items()]


def test_the_table_shows_every_layer_that_loses_more_than_1_db():
    rows = json.loads((RESULTS / "cpu-2026-11-26" / "sums" / "layers.json").read_text())
    wanted = []
    for row in sorted((row for row in rows if row["lost"] > 1.0), key=lambda row: -row["lost"]):
        layer = ".".join(row["layer"].split(".")[-2:])
        noise = [f"{row[name]:.0f} dB" for name in ("rounding", "fast", "promoted")]
        wanted.append([row["architecture"], layer, f"{row['k']:,}", row["weights"], *noise, f"{row['lost']:.1f} dB"])
    page = PAGE.split("### Layers of 20 architectures")[1].split("\n#")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    assert table[2:] == wanted


def test_the_losses_on_the_page_on_speed_are_those_of_the_committed_runs():
    rows = re.findall(r"^\| ([^|]+) \| (\d\.\d+) \| (\d\.\d+) \|$", (DOCS / "speed.md").read_text(), re.MULTILINE)
    levels = json.loads((RESULTS / "cpu-emulated-2026-11-20" / "msamp_levels.json").read_text())
    heads = json.loads((RESULTS / "cpu-emulated-2026-11-22" / "head_levels.json").read_text())
    runs = {"float32" if name == "fp32" else f"MS-AMP {name}": [run["val_loss"] for run in seeds.values()]
            for name, seeds in levels["optimizers"]["adamw"]["runs"].items()}  # fmt: skip
    runs |= {name: list(seeds.values()) for name, seeds in heads["runs"].items()}
    assert rows == [(name, f"{mean(losses):.3f}", f"{stdev(losses):.3f}") for name, losses in runs.items()]


HIDDEN, INNER, KEYS, VOCABULARY, LAYERS = 4096, 14336, 1024, 128256, 32
LINEARS = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER)
NORMS = LAYERS * 2 * HIDDEN
OF_ROOT = Weights(other=2 * VOCABULARY * HIDDEN + HIDDEN)
HIGH = Weights(other=LINEARS + NORMS)
GATHERED = {
    "32-true": (HIGH, torch.float32),
    "bf16-mixed": (HIGH, torch.bfloat16),
    "fp8-hybrid": (Weights(fp8=LINEARS, scales=7 * LAYERS, other=NORMS), torch.bfloat16),
}
RUNS = [(8, 1), (512, 1), (512, 64)]


def bytes_per_step():
    for gpus, copies in RUNS:
        for precision, (of_blocks, dtype) in GATHERED.items():
            v = step(of_blocks, OF_ROOT, shards=gpus // copies, param_dtype=dtype)
            between_copies = all_reduce(4 * (of_blocks.total + OF_ROOT.total) * copies / gpus, copies)
            parts = (v.all_gather_forward + v.all_gather_backward, v.reduce_scatter, between_copies)
            cells = " | ".join(f"{part / 1e9:.1f}" for part in (*parts, sum(parts) + v.scales))
            yield f"| {gpus} | {gpus // copies} x {copies} | {precision} | {cells} |"


def test_the_table_of_bytes_per_step_is_that_of_the_formula():
    """tests/ledger/test_worlds.py counts what a rank sends."""
    table = (DOCS / "fsdp2.md").read_text().split("<!-- volume")[1].split("<!-- /volume")[0]
    assert [line for line in table.splitlines() if re.match(r"\| \d", line)] == list(bytes_per_step())


# ---- what the hooks of the site write


def test_the_list_of_names_has_every_name_with_its_plugin_and_options():
    written = hooks.on_page_markdown((DOCS / "names.md").read_text(), page=None)
    rows = re.findall(r"^\| `([\w-]+)` \| `(\w+)` \| (.*?) \| `[\w-]+` \| .+ \|$", written, flags=re.MULTILINE)
    assert [row[:2] for row in rows] == [(name, row.plugin.__name__) for name, row in TABLE.items()]
    assert dict(zip(TABLE, rows, strict=True))["fp8-rowwise-sr"][2] == (
        "`recipe='rowwise'`, `master_weights='stochastic'`"
    )
    assert "`make docs` writes the list here" not in written
    assert hooks.on_page_markdown("# Other", page=None) == "# Other"


def test_the_page_of_the_notebook_has_every_cell_and_output():
    written = hooks.on_page_markdown((DOCS / "getting-started.md").read_text(), page=None)
    cells = json.loads(notebook.NOTEBOOK.read_text())["cells"]
    for cell in cells[1:]:
        source = "".join(cell["source"])
        shown = source.replace("](../docs/", "](") if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        assert shown in written
    shown = [line for line in written.splitlines() if line.startswith("<pre ")]
    assert len(shown) == sum(len(cell.get("outputs", [])) for cell in cells) - 1, "the picture"
    assert all(line.endswith("</pre>") for line in shown), "Markdown leaves a line of HTML alone"
    assert len([line for line in written.splitlines() if 'src="data:image/png;base64,' in line]) == 1
    assert re.findall("^# .*", written, flags=re.MULTILINE)[0] == "# Getting started"
    assert "](../" not in written
