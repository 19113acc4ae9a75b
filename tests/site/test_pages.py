"""Pages and links lead somewhere; tables of names and options, YAML and output on the pages are those of the code."""

import logging
import re
from dataclasses import fields
from importlib import import_module
from inspect import signature

import lightning as L
import pytest
import yaml

from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO, FSDP2Strategy, LossScale
from lightning_lowprec.tools import cli
from lightning_lowprec.tools.demo import ByteGPT
from tests.representatives import TABLE
from tests.site.pages import DOCS, PAGES, ROOT, Block, blocks
from tools.site import hooks


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
    options = {field.name: field.default for field in fields(FSDP2Strategy().sharding.options)}
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
    stems = {*listed} - suffixes
    assert len(listed) == len({*listed})
    assert stems <= {*TABLE} <= {stem + end for stem in stems for end in ("", "-fp16", *suffixes)}
    assert all(any(f"{stem}{suffix}" in TABLE for stem in stems) for suffix in suffixes)


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
