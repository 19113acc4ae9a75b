"""A plan in a notebook: grouped, escaped, without colours, scripts or addresses."""

from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from lightning_lowprec import plan


class Tags(HTMLParser):
    """The tags, the styles and the text of a piece of HTML; every tag must be closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text, self.rows = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


def read(shown) -> Tags:
    """Parse what a notebook shows, and check what holds for every piece."""
    tags = Tags(shown._repr_html_())
    allowed = {"p", "b", "small", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "ul", "li", "pre"}
    assert set(tags.tags) <= allowed | {"img"}
    assert {name for name, _ in tags.attributes} <= {"style", "alt", "src"}
    styles = {value for name, value in tags.attributes if name == "style"}
    assert styles <= {"text-align:left", "text-align:right", "max-width:100%"}, "no colours: the theme has them"
    sources = [value for name, value in tags.attributes if name == "src"]
    assert all(value.startswith("data:image/png;base64,") for value in sources)
    return tags


def stack(blocks: int) -> nn.Module:
    with torch.device("meta"):
        layers = [nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64)}) for _ in range(blocks)]
        return nn.ModuleDict({"blocks": nn.ModuleList(layers), "lm_head": nn.Linear(64, 256)})


def test_a_thousand_layers_are_three_rows():
    planned = plan(stack(500))
    shown = read(planned)
    assert len(planned.rows) == 1001
    assert [row[:2] for row in shown.rows[1:]] == [
        ["500 x blocks.*.up", "64 -> 128"], ["500 x blocks.*.down", "128 -> 64"], ["lm_head", "64 -> 256"],
    ]  # fmt: skip
    assert shown.rows[3][2] == "kept: output head (by name), bf16"
    assert all(row[2].startswith("FP8, ") for row in shown.rows[1:3])
    assert shown.text[0] == planned.summary()
    assert len(planned._repr_html_()) < 2500
    assert repr(planned).splitlines()[0] == planned.summary()
    assert [line.split("  ")[0] for line in repr(planned).splitlines()[1:]] == [row[0] for row in shown.rows[1:]]


def test_layers_of_a_thousand_names_are_folded():
    with torch.device("meta"):
        names = [
            f"layer_{'abcdefghij'[i % 10]}{'abcdefghij'[i // 10 % 10]}{'abcdefghij'[i // 100]}" for i in range(1000)
        ]
        planned = plan(nn.ModuleDict({name: nn.Linear(64, 64) for name in names}))
    shown = planned._repr_html_()
    assert "<details><summary>960 more rows</summary>" in shown
    at_once, _, folded = shown.partition("<details>")
    assert at_once.count("<tr>") == 41
    assert folded.count("<tr>") == 961
    assert [row[0] for row in read(planned).rows if row[0] != "layer"] == names


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", 'a"onload="x', "<img src=x>", "&lt;b&gt;"])
def test_names_and_reasons_are_text(name):
    model = nn.ModuleDict({name: nn.Linear(16, 16), f"{name}head": nn.Linear(15, 16)})
    planned = plan(model, keep=[name])
    shown = read(planned)
    assert shown.rows[1][0] == name
    assert name in shown.rows[1][2], "the reason names the layer"
    assert "<script" not in planned._repr_html_()
    assert "<img" not in planned._repr_html_()


def test_a_model_without_layers_and_a_model_that_is_a_layer():
    assert read(plan(nn.ReLU())).text == ["The model has no Linear."]
    assert repr(plan(nn.ReLU())).endswith("(the model has no Linear)")
    assert read(plan(nn.Linear(16, 16))).rows[1][0] == "(the model)"
    other = plan(nn.Linear(16, 16), "int8-mixed")
    assert read(other).rows[1][2] == "int8"
    assert "gains per layer: not known for int8" in read(other).text
