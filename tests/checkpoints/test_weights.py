"""Weights are read by rows as they are as a whole, wherever the pieces lie; what cannot be read is named."""

import json
import pickle
import random
import re
import struct

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_lowprec.checkpoints.load import open_checkpoint
from lightning_lowprec.checkpoints.weights import open_weights
from tests.checkpoints.test_hostile_configs import STRANGE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WHOLE = torch.arange(7.0 * 5).reshape(7, 5)
QUARTERS = {(0, 0): (4, 2), (0, 2): (4, 3), (4, 0): (3, 2), (4, 2): (3, 3)}


@pytest.fixture
def quarters(tmp_path):
    """A folder whose weight lies in four pieces, as tensor parallelism and sharding together cut it."""
    parts = {at: WHOLE[at[0] : at[0] + size[0], at[1] : at[1] + size[1]] for at, size in QUARTERS.items()}
    save({"model": {f"{at}": part.clone() for at, part in parts.items()}}, checkpoint_id=tmp_path / "c")
    torch.save({}, tmp_path / "c" / "meta.pt")
    table = FileSystemReader(tmp_path / "c").read_metadata()
    weight = table.state_dict_metadata[f"model.{(0, 0)}"]
    weight.size = WHOLE.shape
    weight.chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in QUARTERS.items()]
    places = {at: table.storage_data[MetadataIndex(f"model.{at}", (0, 0))] for at in QUARTERS}
    table.storage_data = {MetadataIndex("model.weight", torch.Size(at)): place for at, place in places.items()}
    table.state_dict_metadata = {"model.weight": weight}
    table.planner_data = {"model.weight": ("model", "weight")}
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(table))
    return tmp_path / "c"


def test_pieces_along_both_dimensions(quarters):
    source = open_weights(quarters)
    for start in range(7):
        for stop in range(start + 1, 8):
            assert torch.equal(source.rows("weight", start, stop), WHOLE[start:stop])
    linear = nn.Linear(5, 7, bias=False)
    assert torch.equal(open_checkpoint(quarters).model("model", linear.state_dict())["weight"], WHOLE)


def resumes(path):
    open_checkpoint(path).model("model", nn.Linear(5, 7, bias=False).state_dict())


CUTS = {
    "a piece is missing": lambda pieces: pieces[1:],
    "a piece is there twice": lambda pieces: [*pieces, pieces[0]],
    "a piece twice, another never": lambda pieces: [*pieces[:3], pieces[2]],
    "as many values as the tensor has, overlapping": lambda pieces: [((0, 0), (4, 2)), ((0, 0), (3, 2)), *pieces[1:3],
                                                                     ((4, 3), (3, 2)), ((4, 2), (1, 1))],
    "outside": lambda pieces: [*pieces[:3], ((5, 2), (3, 3))],
    "before the start": lambda pieces: [((-1, 0), (4, 2)), *pieces[1:]],
    "a size below zero": lambda pieces: [((4, 2), (-4, -2)), *pieces[1:]],
    "another number of dimensions": lambda pieces: [((0,), (4,)), *pieces[1:]],
    "no piece": lambda _: [],
}  # fmt: skip


@pytest.mark.parametrize("reader", [resumes, open_weights])
@pytest.mark.parametrize("cut", CUTS)
def test_pieces_that_do_not_hold_every_value_once(quarters, cut, reader):
    table = FileSystemReader(quarters).read_metadata()
    pieces = CUTS[cut](list(QUARTERS.items()))
    place = next(iter(table.storage_data.values()))
    table.state_dict_metadata["model.weight"].chunks = [
        ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in pieces
    ]
    table.storage_data |= {MetadataIndex("model.weight", torch.Size(at)): place for at, _ in pieces}
    (quarters / ".metadata").write_bytes(pickle.dumps(table))
    said = r"\.metadata' is damaged, or is no table of contents: the pieces of 'model.weight' do not hold every value"
    with pytest.raises(ValueError, match=said):
        reader(quarters)


@pytest.mark.parametrize("size", [(), (0, 3), (5,)])
def test_tensors_without_dimensions_or_values(size, tmp_path):
    save({"model": {"a": torch.ones(size)}}, checkpoint_id=tmp_path / "c")
    torch.save({}, tmp_path / "c" / "meta.pt")
    assert torch.equal(open_weights(tmp_path / "c").whole("a"), torch.ones(size))


def test_safetensors_of_any_shape_and_dtype(tmp_path):
    tensors = {"codes": WHOLE.to(torch.float8_e4m3fn), "half": WHOLE.bfloat16()}
    tensors |= {"scale": torch.tensor(0.5), "none": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"more": WHOLE}, tmp_path / "b.safetensors")
    files = {**dict.fromkeys(tensors, "a.safetensors"), "more": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    source = open_weights(tmp_path)
    assert source.shapes == {n: (t.shape, t.dtype) for n, t in {**tensors, "more": WHOLE}.items()}
    assert torch.equal(source.rows("codes", 2, 5).float(), tensors["codes"].float()[2:5])
    assert torch.equal(source.rows("half", 0, 7), tensors["half"])
    assert torch.equal(source.rows("scale", 0, 1), torch.tensor([0.5]))
    assert source.rows("none", 0, 0).shape == (0, 3)
    with pytest.raises(ValueError, match=r"a\.safetensors' holds no weights under 'ema'; it has: 'codes'"):
        open_weights(tmp_path / "a.safetensors", "ema")
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b\.safetensors' is missing; expected a file of safetensors"):
        open_weights(tmp_path)


def test_a_file_of_torch_without_weights_is_named(tmp_path):
    torch.save({"model": {"a": WHOLE}, "step": 3}, tmp_path / "a.ckpt")
    torch.save([1, 2], tmp_path / "list.pt")
    for name, key, said in (
        ("a.ckpt", "ema", "holds no weights under 'ema'; it has: 'model', 'step'. Name the right one with `--key`"),
        ("list.pt", None, "it has: list"),
        ("gone.ckpt", None, "is no file and no folder; expected a checkpoint"),
    ):
        with pytest.raises(ValueError, match=f"{name}'.*{said}"):
            open_weights(tmp_path / name, key)


def safetensors(entries):
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(64)


@pytest.mark.parametrize("seed", range(2))
def test_an_index_reads_files_of_its_folder_or_names_itself(seed, tmp_path):
    generator = random.Random(seed)
    right = {"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
    (tmp_path / "outside.safetensors").write_bytes(safetensors(right))
    for index in range(25):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "a.safetensors").write_bytes(safetensors(right))
        strange = generator.choice([*STRANGE, "../outside.safetensors", str(tmp_path / "outside.safetensors")])
        shown = generator.choice([{"weight_map": {"a": strange}}, {"weight_map": strange}, strange, {"x": strange}])
        (folder / "model.safetensors.index.json").write_text(json.dumps(shown))
        with pytest.raises(ValueError, match=re.escape(str(folder))):
            open_weights(folder)


def test_a_file_of_values_that_torch_cannot_read_is_named(tmp_path):
    file = tmp_path / "four-bits.safetensors"
    file.write_bytes(safetensors({"a.weight": {"dtype": "F4", "shape": [8, 16], "data_offsets": [0, 64]}}))
    with pytest.raises(ValueError, match=r"'a\.weight' of '.*four-bits.safetensors' has the format F4"):
        open_weights(file)
