"""Every page is in the navigation, and every link of a page has a page, a file and a heading behind it."""

import re
from dataclasses import fields
from inspect import signature

import pytest
import yaml

from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO, FSDP2Strategy, LossScale
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.names import TABLE
from tests.site.pages import DOCS, PAGES, ROOT
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
    """Return the anchors of the headings, as the site and code hosts make them."""
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
