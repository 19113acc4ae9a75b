"""`lowprec monitor RUN`: a page that loads nothing, a table of the worst layers, and the list of layers to keep."""

import base64
import json
import re

import pytest

from lightning_lowprec.tools.cli import main

FILE = "numerics.jsonl"
TENSORS = ("input", "weight", "gradient")
GOOD, OLD = (None, 0.0, 34.0), (0.5,)  # earlier versions had one more number, before the scale


def write(folder, bad, layers=4, samplings=6):
    """A run in which ``bad[layer]`` = (tensor, underflow, output_db) holds in one sampling and in the last three."""
    with (folder / FILE).open("w") as file:
        for sampling in range(samplings):
            found = {}
            for layer in range(layers):
                spoiled, underflow, output_db = bad.get(layer, GOOD) if sampling not in (0, 2) else GOOD
                shares = {tensor: underflow if tensor == spoiled else 0.01 for tensor in TENSORS}
                numbers = {t: [2.0**layer, share, *OLD * (layer % 2), 2.0**sampling] for t, share in shares.items()}
                found[f"blocks.{layer}.up"] = {**numbers, "output_db": output_db}
            file.write(json.dumps({"step": 100 * sampling, "layers": found}) + "\n")


def content_of(page):
    return json.loads(re.search(r"const content = (\{.*\});", page).group(1))


def test_the_page_has_every_number_and_loads_nothing(tmp_path, capsys):
    run = tmp_path / "a<b"
    run.mkdir()
    write(run, {1: ("input", 0.0, 21.0), 2: ("gradient", 0.75, 9.0)})
    assert main(["monitor", str(run)]) == 0
    page = (run / "monitor.html").read_text()
    assert not re.findall(r"""(?:src|href)\s*=|https?://|@import|fetch\(|url\(""", page)
    content = content_of(page)
    assert content["run"] == f"{tmp_path.name}/a<b"
    assert "a<b" not in page, "no tag begins in a script"
    assert content["steps"] == [0, 100, 200, 300, 400, 500]
    assert content["layers"] == [f"blocks.{layer}.up" for layer in range(4)]
    names = ("underflow", "amax", "scale")
    assert [m["title"] for m in content["maps"]] == ["output dB"] + [f"{n} of {t}" for n in names for t in TENSORS]
    maps = {m["title"]: m for m in content["maps"]}
    assert [title for title, m in maps.items() if m["lowIsBad"]] == ["output dB"]
    assert [(m["fixed"], m["unit"]) for m in maps.values()] == [(True, " dB"), *[(True, "")] * 3, *[(False, "")] * 6]

    def at(title, layer, sampling):
        cells, chosen = base64.b64decode(maps[title]["cells"]), maps[title]
        level = cells[6 * layer + sampling]
        drawn = chosen["least"] + (level - 1) / 254 * (chosen["most"] - chosen["least"])
        return 2**drawn if chosen["log"] else drawn

    assert (at("output dB", 2, 2), at("output dB", 2, 4)) == (30, 10), "34 and 9 dB are drawn as the ends"
    assert at("output dB", 1, 4) == pytest.approx(21, abs=20 / 254)
    assert at("underflow of gradient", 2, 4) == pytest.approx(0.75, abs=1 / 254)
    assert at("underflow of weight", 2, 4) == pytest.approx(0.01, abs=1 / 254)
    assert [at("amax of input", layer, 3) for layer in range(4)] == pytest.approx([1, 2, 4, 8], rel=0.01)
    assert [at("scale of input", 1, s) for s in range(6)] == pytest.approx([1, 2, 4, 8, 16, 32], rel=0.01)
    table = capsys.readouterr().out.splitlines()
    assert " ".join(table[1].split()) == "blocks.2.up 9.0 1.00% 1.00% 75.00% 3 75% of gradient become 0"
    assert "4 layers, 6 samplings, steps 0 to 500." in table
    assert "1 layers are beyond a limit in their last 3 readings; `--keep` lists them." in table


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["blocks.1.up", "blocks.3.up"]),
        (["--patience=4"], []),
        (["--underflow=0.1"], [f"blocks.{layer}.up" for layer in range(4)]),
        (["--output-db", "5", "--underflow=0.9"], []),
    ],
)
def test_keep_lists_the_layers_beyond_the_limits(tmp_path, capsys, options, expected):
    bad = {0: ("gradient", 0.3, 20.0), 1: ("input", 0.31, 25.0), 2: ("weight", 0.2, 21.0), 3: ("input", 0.0, 19.0)}
    write(tmp_path, bad)
    assert main(["monitor", str(tmp_path), "--keep", *options]) == 0
    scope = {}
    exec(capsys.readouterr().out, scope)
    assert sorted(scope["keep"]) == expected
    assert not (tmp_path / "monitor.html").exists()


def test_the_worst_layer_stands_first_and_what_is_not_finite_is_beyond_every_limit(tmp_path, capsys):
    write(tmp_path, {1: ("input", 0.0, 19.0), 2: ("input", None, 12.0), 3: ("input", 0.9, None)}, layers=12)
    assert main(["monitor", str(tmp_path)]) == 0
    names = re.findall(r"blocks\.(\d+)\.up", capsys.readouterr().out)
    assert names == ["2", "1", "3", "0", *"456789"], "ten layers"
    page = tmp_path / "elsewhere.html"
    assert main(["monitor", str(tmp_path), "--json", f"--html={page}", "--patience=2", "--output-db=15"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["limits"] == {"underflow": 0.3, "output_db": 15, "patience": 2}
    assert (said["page"], said["keep"]) == (str(page), ["blocks.2.up", "blocks.3.up"])
    assert content_of(page.read_text())["steps"] == said["steps"] == list(range(0, 600, 100))
    of_two, *_ = said["layers"]
    reasons = ["output has 12.0 dB", "90% of input become 0", *[None] * 10]
    assert [layer["reason"] for layer in said["layers"]] == reasons
    shares = {"weight": 0.01, "gradient": 0.01}
    assert of_two == {"fqn": "blocks.2.up", "output_db": 12, "underflow": shares, "beyond": 3, "reason": reasons[0]}
    for tensor in ("gradient", "input"):
        layer = {"input": [1.0, 0.0, 0.0, 1.0], "weight": [0.0, *[None] * 3], tensor: [None] * 4, "output_db": None}
        lines = [{"step": step, "layers": {"up": layer}} for step in range(3)]
        (tmp_path / FILE).write_text("\n".join(map(json.dumps, lines)))
        assert main(["monitor", str(tmp_path), "--keep"]) == 0
        assert capsys.readouterr().out == f'keep=[\n    "up",  # {tensor} is not finite\n]\n'
    assert main(["monitor", str(tmp_path)]) == 0
    assert not any(
        any(base64.b64decode(m["cells"])) for m in content_of((tmp_path / "monitor.html").read_text())["maps"]
    )


def test_what_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text('{"loss": 1}\n')
    for given, message in (
        (tmp_path, "has no numerics.jsonl; expected the `folder` of a NumericsMonitor"),
        (tmp_path / "other.jsonl", "line 1 of"),
    ):
        assert main(["monitor", str(given)]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / FILE).write_text('{"step"')
    assert main(["monitor", str(tmp_path)]) == 2
    assert "holds no sampling of a NumericsMonitor" in capsys.readouterr().err
