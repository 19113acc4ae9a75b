"""`lowprec plan`: sources, options, what is printed, and the figures behind it."""

import json
import logging
import re

import lightning as L
import pytest
import torch
from torch import nn

import lightning_lowprec
from lightning_lowprec.tools.cli import main
from lightning_lowprec.tools.demo import ByteGPT

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def llama(tmp_path, layers):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": layers}))
    return path


def run_json(capsys, *args):
    assert main(["plan", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


class Frozen(nn.Sequential):
    def __init__(self, sizes=((32, 64), (64, 16), (16, 3))):
        super().__init__(*(nn.Linear(k, n, bias=False) for k, n in sizes))
        self[1].requires_grad_(False)


FROZEN = f"{__name__}.Frozen"


class Uneven(nn.Module):
    """Three blocks, of which the second is the largest and trains half, and a head that is the embedding."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head.weight = self.table.weight
        self.blocks = nn.ModuleList(Frozen([(32, 64 * width), (64 * width, 32)]) for width in (1, 2, 1))
        for block in (self.blocks[0], self.blocks[2]):
            block.requires_grad_()


def state(row):
    return row["weights"] + row["gradients"] + row["optimizer"]


def test_flops_and_bytes_by_hand(tmp_path, capsys):
    data = run_json(capsys, FROZEN, "--precision", "fp8-hybrid")
    counted, by_name = data["flops_per_token"], {row["precision"]: row for row in data["bytes"]}
    assert counted["fp8"] == 6 * 32 * 64 + 4 * 64 * 16, "a frozen weight has no weight gradient"
    assert (counted["high_precision"], counted["attention"]) == (6 * 16 * 3, 0)
    other_heads = "--args", '{"head_dim": 64, "num_hidden_layers": 3}'
    of_llama = run_json(capsys, llama(tmp_path, 2), *other_heads, "--sequence_length", 7)["flops_per_token"]
    assert of_llama["attention"] == 6 * 7 * 3 * 32 * 64
    of_gpt2 = run_json(capsys, "gpt2")["flops_per_token"]["attention"]
    assert of_gpt2 == 6 * 4096 * 12 * 768, "no head_dim in the config; the length of the default"
    assert run_json(capsys, "convnext")["flops_per_token"]["attention"] == 0, "no heads in the config"
    share = of_llama["fp8"] / (of_llama["fp8"] + of_llama["high_precision"] + of_llama["attention"])
    assert of_llama["fp8_share"] == pytest.approx(share)
    for name, scales in (("fp8-hybrid", 1), ("fp8-block", 2 * 3)):
        sizes = "--args", json.dumps({"sizes": [[32, 64], [208, 304], [16, 3]]}), "--precision", name
        codes = run_json(capsys, FROZEN, "--frozen=codes", *sizes)["bytes"][-1]
        assert codes["weights"] == 4 * (2048 + 48) + 208 * 304 + 4 * scales, "a byte per value, and a scale or several"
    total, trained, converted = 2048 + 1024 + 48, 2048 + 48, 2048 + 1024
    assert state(by_name["32-true"]) == 4 * total + 12 * trained
    assert state(by_name["bf16-true"]) == 2 * total + 6 * trained
    assert by_name["fp8-hybrid"]["gathered"] == converted + 2 * (total - converted)
    assert by_name["32-true"]["gathered"] == 4 * total
    assert by_name["fp8-hybrid"]["host"] == 0
    assert by_name["bf16-mixed"]["gathered"] == by_name["bf16-true"]["gathered"] == 2 * total
    rowwise = run_json(capsys, FROZEN, "--precision", "fp8-rowwise")["bytes"][-1]
    assert rowwise["gathered"] == 2 * total, "a scale per row cannot be gathered"
    for level, per_weight, frozen in (("o1", 11, 2), ("o2", 6, 2), ("o3", 7, 1)):
        scaled = run_json(capsys, FROZEN, "--precision", f"msamp-{level}")["bytes"][-1]
        assert (scaled["host"], state(scaled)) == (4 * 1024, per_weight * trained + frozen * 1024)

    def last_of_two_ranks(precision, sizes):
        shards = "--precision", precision, "--args", json.dumps({"sizes": sizes}), "--shards", 2
        return run_json(capsys, FROZEN, *shards)["per_rank"][-1]

    frozen = last_of_two_ranks("msamp-o3", [[32, 64], [64, 32]])
    assert frozen["state"] * 2 == 10 * 2048 + 2048, "gradients in float32; codes alone where nothing trains"
    stored = ("--args", json.dumps({"sizes": [[32, 64], [64, 32]]}), "--shards", 2, "--frozen=codes")
    of_codes = run_json(capsys, FROZEN, *stored)["per_rank"][-1]["state"]
    assert of_codes * 2 == 16 * 2048 + 2048 + (2048 + 4), "codes of the other weight are kept from gather to gather"
    tiles = last_of_two_ranks("fp8-block", [[208, 304], [304, 208]])["sent"]
    assert tiles["scales"] == 2 * 1 / 2 * 4 * 2 * (3 * 2), "parts of tiles have scales"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_says_the_float32_values_in_host_memory_as_the_log_does(dtype, capsys, caplog):
    source = f"{__name__}.HalfFrozen", "--args", json.dumps({"dtype": dtype}), "--precision", "fp8-hybrid-8bit"
    assert run_json(capsys, *source)["bytes"][-1]["host"] == (4 * (64 + 1) * 32 if dtype == "float32" else 0)
    assert main(["plan", *source]) == 0
    model = HalfFrozen(dtype)
    fabric = L.Fabric(accelerator="cpu", precision="fp8-hybrid-8bit")
    with caplog.at_level(logging.INFO):
        wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model[0].parameters(), 0.1))
        fabric.backward(wrapped(torch.ones(4, 64)).float().sum())
        optimizer.step()
    for text in (capsys.readouterr().out, caplog.text):
        assert bool(re.search(r"host memory[:,] 8.32 kB", text)) is (dtype == "float32")
        assert ("host memory" in text) is (dtype == "float32")


class HalfFrozen(nn.Sequential):
    def __init__(self, dtype):
        frozen = nn.Linear(64, 32).requires_grad_(False).to(getattr(torch, dtype))
        super().__init__(nn.Linear(64, 64), frozen)
        self.A_log = nn.Parameter(torch.ones(99), requires_grad=False)  # stays float32, by its name


def test_the_all_gather_column_knows_which_recipes_gather_float8(tmp_path, capsys):
    config = llama(tmp_path, 1)
    names = ("fp8-hybrid", "fp8-rowwise", "fp8-hybrid-te", "fp8-block-te", "fp8-block")
    gathered = {name: run_json(capsys, config, "--precision", name)["bytes"][-1]["gathered"] for name in names}
    linears = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert gathered["fp8-rowwise"] - gathered["fp8-hybrid"] == linears
    assert gathered["fp8-hybrid-te"] == gathered["fp8-block-te"] == gathered["fp8-rowwise"], "in bf16"
    assert gathered["fp8-block"] == gathered["fp8-hybrid"]
    in_bf16 = ('*.q_proj={"grad_input": "bf16"}', '*.k_proj={"grad_weight": "bf16"}')
    recipes = ["--recipe", "*.o_proj=rowwise", *in_bf16, "*=tensorwise"]
    data = run_json(capsys, config, "--precision", "fp8-hybrid", *recipes, "--shards", 8)
    assert data["bytes"][-1]["gathered"] - gathered["fp8-hybrid"] == 2 * 4096 * 4096, "bf16 takes a byte more"
    assert data["flops_per_token"]["fp8"] == 6 * linears - 2 * 4096 * (4096 + 1024), "two products are not in FP8"
    two_scales = ["--recipe", "*.o_proj=block", "*=tensorwise"]
    mixed = run_json(capsys, config, "--precision", "fp8-hybrid", *two_scales, "--shards", 8)
    assert mixed["bytes"][-1]["gathered"] == gathered["fp8-rowwise"], "two kinds of scales are gathered in bf16"
    sent = [
        data["per_rank"][-1]["sent"]["all_gather_forward"] for data in (data, run_json(capsys, config, "--shards", 8))
    ]
    assert sent[0] - sent[1] == 2 * 4096 * 4096 * 7 / 8


def test_what_one_rank_holds_and_sends(tmp_path, capsys):
    linears = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    block, root = linears + 2 * 4096, 2 * 128256 * 4096 + 4096
    everything = 2 * block + root
    deep = run_json(capsys, llama(tmp_path, 12), "--precision", "fp8-hybrid", "--shards", 8)["per_rank"]
    config = llama(tmp_path, 2)  # `layers.1` is not a part of the name `layers.10`
    data = run_json(capsys, config, "--precision", "fp8-hybrid", "--shards", 8)
    assert [rank["in_flight"] for rank in data["per_rank"]] == [rank["in_flight"] for rank in deep]
    by_name = {row["precision"]: row for row in data["per_rank"]}
    state = {"32-true": 16, "bf16-true": 8, "bf16-sr": 12, "bf16-remainder": 14, "bf16-master": 16, "bf16-mixed": 16}
    state |= {"bf16-8bit": 8}
    float8 = by_name.pop("fp8-hybrid")
    assert {name: row["state"] * 8 / everything for name, row in by_name.items()} == state
    assert float8["state"] * 8 == 16 * everything + 2 * linears, "the rank keeps the codes of its shards"
    assert by_name["bf16-mixed"]["in_flight"] == 6 * root, "more than a block beside the root"
    assert by_name["32-true"]["in_flight"] == max(8 * root, 8 * root + 12 * block)
    sent = float8["sent"]
    assert sent["all_gather_forward"] == (2 * (linears + 2 * 2 * 4096) + 2 * root) * 7 / 8
    assert sent["all_gather_backward"] == 2 * (linears + 2 * 2 * 4096) * 7 / 8
    assert sent["reduce_scatter"] == 4 * everything * 7 / 8
    # largest values of weights, or of their tiles, are reduced over 8 ranks in float32: 7 Linears in each of 2 blocks
    assert sent["scales"] == 2 * 7 / 8 * 4 * 2 * 7
    for name, tile in (("fp8-block", 128), ("mxfp8", 32)):
        of_tiles = run_json(capsys, config, "--precision", name, "--shards", 8)["per_rank"][-1]["sent"]
        assert of_tiles["scales"] == 2 * 7 / 8 * 4 * 2 * linears / tile**2
    uneven = run_json(capsys, f"{__name__}.Uneven", "--shards", 4)
    assert uneven["bytes"][0]["weights"] == 4 * (16384 + 50 * 32 + 1)
    root, frozen, of_one = 52 * 32 + 4, 32 * 128, uneven["per_rank"][-1]  # 13 rows on each rank
    assert of_one["in_flight"] == 4 * root + 2 * frozen + 6 * frozen, "the second block, of which a half trains"
    assert of_one["sent"] == {
        "all_gather_forward": (16384 + 2 * root) * 3 / 4, "all_gather_backward": 16384 * 3 / 4,
        "reduce_scatter": 4 * (16384 - frozen + root) * 3 / 4, "scales": 2 * 3 / 4 * 4 * 6,
    }  # fmt: skip
    of_msamp = run_json(capsys, f"{__name__}.Uneven", "--shards", 4, "--precision=msamp-o3")["per_rank"][-1]
    assert of_msamp["sent"]["scales"] == 3 * of_one["sent"]["scales"], "of two moments too"
    # MS-AMP under FSDP2: codes are gathered, gradients are float32; O2 does not run there
    data = run_json(capsys, config, "--precision", "msamp-o3", "--shards", 8)
    o3 = data["per_rank"][-1]
    assert (o3["precision"], o3["state"] * 8) == ("msamp-o3", 10 * 2 * linears + 16 * (everything - 2 * linears))
    assert o3["sent"]["all_gather_backward"] == sent["all_gather_backward"]
    assert data["bytes"][-1]["gathered"] == 2 * linears + 2 * (everything - 2 * linears)
    names = [row["precision"] for row in run_json(capsys, config, "--precision", "msamp-o2", "--shards", 8)["per_rank"]]
    assert names[-1] == "bf16-mixed"


def test_what_one_rank_holds_as_text_and_what_is_refused(tmp_path, capsys):
    config = str(llama(tmp_path, 2))
    assert main(["plan", config, "--shards", "8"]) == 0
    text = capsys.readouterr().out
    assert "in flight: at most so much more" in text
    assert max(map(len, text.partition("one rank")[2].splitlines())) <= 100
    data = run_json(capsys, config, "--shards", 8)
    whole, rank = data["bytes"][-1], data["per_rank"][-1]
    sent = [sum(size for name, size in rank["sent"].items() if kind in name) for kind in ("gather", "reduce")]
    columns = *(whole[name] for name in ("weights", "gradients", "optimizer")), state(whole), whole["gathered"]
    shown = [line.split()[1::2] for line in text.splitlines() if line.startswith("fp8-hybrid ")]
    assert shown == [
        [f"{size / 1e9:.3g}" for size in row] for row in (columns, (rank["state"], rank["in_flight"], *sent))
    ]
    for *words, message in (
        (config, "0", "`shards=0` is not valid; expected an integer of at least 1"),
        (config, "3", "4096 output features, which do not divide into equal shards"),
        ("mixtral", "16", "'model.layers.0.mlp.experts.gate_up_proj' has 8 experts, which do not divide into equal"),
        ("gpt2", "5", "'transformer.h.0.attn.c_attn' has 768 input features, which do not divide into equal shards"),
    ):
        assert main(["plan", words[0], "--shards", words[1]]) != 0
        assert message in capsys.readouterr().err


def test_a_mixture_counts_what_a_token_uses(capsys):
    config = {"num_hidden_layers": 1, "num_local_experts": 8, "num_experts_per_tok": 2}
    of_experts, of_attention = 6 * 2 * 3 * 4096 * 14336, 6 * (2 * 4096 + 2 * 1024) * 4096
    everything = of_attention + of_experts
    for precision, in_fp8, reason in (
        ("fp8-hybrid", everything, None), ("fp8-hybrid-fp16", of_attention, "round to bf16"),
        ("fp8-block", of_attention, "no Linear"), ("fp8-hybrid-te-fp16", of_attention, "'fp8-hybrid', by torchao"),
    ):  # fmt: skip
        data = run_json(capsys, "mixtral", "--args", json.dumps(config), "--precision", precision)
        experts = [row for row in data["plan"] if row["kind"] == "stacked experts"]
        assert [(row["stored"], row["per_token"]) for row in experts] == [(8, 2.0), (8, 2.0)]
        assert all(row["kept_because"] is reason or reason in row["kept_because"] for row in experts)
        assert data["flops_per_token"]["fp8"] == in_fp8
        gathered = {row["precision"]: row["gathered"] for row in data["bytes"]}
        stored = (of_experts * 4 if in_fp8 > of_attention else 0) + of_attention  # 8 experts, of which a token uses 2
        less = 0 if "-te" in precision else stored / 6  # Transformer Engine's are gathered in bf16
        assert gathered["bf16-mixed"] - gathered[precision] == less, "one byte less per weight in FP8"


def test_text_collapses_blocks_and_all_shows_each(tmp_path, capsys):
    config = llama(tmp_path, 3)
    assert main(["plan", str(config)]) == 0
    text = capsys.readouterr().out
    assert "3 x model.layers.*.self_attn.k_proj" in text
    assert "slower than bf16" in text, "4096 -> 1024 is below tensorwise's published break-even"
    assert main(["plan", str(config), "--all"]) == 0
    assert "model.layers.2.self_attn.k_proj" in capsys.readouterr().out
    assert text.startswith("transformers config config.json: converted 21 of 22 linear layers")
    slow = "6 of 21 converted layers are expected to be slower than in bf16; `--keep` keeps"  # k and v, 4096 -> 1024
    for said in ("\n32-true ", "matrix FLOPs per token", slow, "gains per layer", "all-gather:"):
        assert said in text
    assert main(["plan", f"{__name__}.Narrow"]) == 0
    said = capsys.readouterr().out
    assert "\n(the model) " in said
    assert "1 of 1 converted layers are expected to be slower than in bf16; `bf16-mixed` is" in said
    assert {*MADE_ON} == {"meta"}, "without weights"
    assert main(["plan", f"{__name__}.Narrow", "--keep", "*"]) == main(["plan", "torch.nn.Flatten"]) == 1, "none"
    assert main(["plan", f"{__name__}.Narrow", "--precision=msamp-o2"]) == 0
    assert re.search(r"\nmsamp-o2 .* -\n", capsys.readouterr().out), "it gathers nothing"
    assert main(["plan", "mixtral", "--precision=int8-mixed"]) == 0
    text = capsys.readouterr().out.partition("transformers defaults of 'mixtral'")[2]
    others = " int8\n", "in int8 (", "gains per layer: not known for int8"
    for said in ("kept: no Linear (stacked experts), bf16", *others):
        assert said in text
    assert "FP8" not in text.split("with AdamW")[0]


MADE_ON = []


class Narrow(nn.Linear):
    def __init__(self):
        super().__init__(64, 64)
        MADE_ON.append(self.weight.device.type)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nosuch"], "'nosuch' is no model; expected a class path"),
        (["llama", "--precision=half-auto"], "`precision='half-auto'` converts no layers; expected one of: fp8-hybrid"),
        (["llama", "--keep", "q_projx"], "`keep='q_projx'` matches no Linear of the model; the nearest are: '"),
        (["llama", "--num-layers-at-start-in-bf16=-2"], "`num_layers_at_start_in_bf16=-2` is not valid"),
        (["llama", "--recipe", '*={"forward"'], "is no JSON (Expecting ':' delimiter"),
        (["no.such.Model"], "No module named 'no', neither in the working folder"),
        (["no/gone.py:Model"], "'no/gone.py' is not a file"),
        (["gone.py"], "'gone.py' names no class; expected gone.py:Model"),
        (["gone.json"], "'gone.json' is no model; expected a class path"),
        (["no/such.folder"], "'no/such.folder' is no model; expected a class path"),
        (["collections.Counter"], "'collections.Counter' makes a Counter; expected a LightningModule or a Module"),
        (["tests"], "'tests' is no model; expected a class path"),
        (
            ["llama", "--precisions", "fp8-hybrid,fp8-rowwise"],
            "`precisions` goes with `--fits`. For a plan name one precision by `--precision`.",
        ),
    ],
)
def test_bad_input(args, message, capsys):
    assert main(["plan", *args]) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_no_models(tmp_path, capsys):
    for name, content, message in (
        ("config.json", "[1]", "holds a list; expected a config.json"),
        ("config.json", "{", "is no JSON file: Expecting property"),
        ("config.json", "{}", "has no `model_type`"),
        ("config.json", '{"model_type": "llama", "attn_implementation": "a/b"}', "has attn_implementation='a/b'"),
        ("config.json", '{"model_type": "llava", "text_config": {"experts_implementation": "a/b"}}', "='a/b'"),
        ("last.ckpt", "a pickle", "is no model; expected a class path"),
    ):
        (tmp_path / name).write_text(content)
        assert main(["plan", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert name in said
        assert message in said


CNN = """
import lightning as L, torch
from torch import nn
class Net(L.LightningModule):
    def __init__(self, width: int = 32):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, width))
        self.example_input_array = torch.randn(2, 3, 32, 32)
    def configure_model(self):
        self.late = nn.Linear(64, 48)
    def forward(self, x): return self.late(self.net(x))
"""


def test_convolutions_count_as_kept(tmp_path, capsys, monkeypatch):
    """The share is of the linear layers; the model has what `configure_model` adds."""
    (tmp_path / "cnn.py").write_text(CNN)
    monkeypatch.syspath_prepend(tmp_path)
    data = run_json(capsys, "cnn.Net", "--args", '{"width": 64}')
    assert {row["fqn"] for row in data["plan"] if row["kept_because"] is None} == {"net.3", "late"}
    assert [(row["kind"], row["kept_because"]) for row in data["plan"]][-1] == ("Conv2d", "no Linear (Conv2d)")
    assert main(["plan", "cnn.Net"]) == 0
    text = capsys.readouterr().out
    assert "matrix FLOPs per token of the linear layers: 100.0% in FP8" in text
    lines = [line for line in text.splitlines() if not line.startswith("cnn.Net")]
    assert max(map(len, lines)) <= 100


class Recurrent(nn.ModuleList):
    def __init__(self):
        recurrent = [nn.LSTM(64, 64), nn.GRUCell(64, 64), nn.MultiheadAttention(64, 1, kdim=64, vdim=32)]
        others = [nn.MultiheadAttention(64, 1), nn.Linear(64, 64), nn.Conv1d(9, 9, 9), nn.ConvTranspose1d(9, 9, 9)]
        super().__init__([*recurrent, *others])


def test_recurrent_layers_and_in_proj_count_as_kept(capsys):
    """By hand: a step of an LSTM is 4 x (64 x 64 + 64 x 64), of a GRU 3; in_proj has 3 x 64 x 64, or 2.5."""
    data = run_json(capsys, f"{__name__}.Recurrent")
    counted = data["flops_per_token"]
    assert data["plan"][-1]["kind"] == "ConvTranspose1d"
    assert (counted["fp8"], counted["high_precision"]) == (6 * 64 * 64, 6 * 64 * 64 * (8 + 6 + 2.5 + 1 + 3 + 1))
    assert main(["plan", f"{__name__}.Recurrent"]) == 0
    words = "kept, 2 convolutions, attention, products of bare parameters not known and not counted"
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("model", ["lightning_lowprec.tools.demo.ByteGPT", ByteGPT()], ids=["path", "model"])
def test_a_plan_is_that_of_the_command(model, capsys):
    plan = lightning_lowprec.plan(model, "fp8-rowwise", keep=["blocks.0"])
    source = "lightning_lowprec.tools.demo.ByteGPT"
    assert main(["plan", source, "--precision", "fp8-rowwise", "--keep", "blocks.0"]) == 0
    said = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = [(words[0], words[-1].strip()) for words in said if words[0].startswith(("3 x", "blocks", "lm_head"))]
    listed = [line.split("  ") for line in repr(plan).splitlines()[1:]]
    assert [row[0] for row in rows] == [words[0] for words in listed]
    assert all(said.startswith(words[-1].strip()) for (_, said), words in zip(rows, listed, strict=True))
    assert len(plan.converted) == 12
    with pytest.raises(TypeError, match=r"`model=None` is not valid; expected a Module, or a string"):
        lightning_lowprec.plan(None)
