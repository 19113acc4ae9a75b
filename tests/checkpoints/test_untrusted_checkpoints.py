"""Pickles in a checkpoint run no code unless the user says so; what cannot be read raises with its path."""

import functools
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import struct
import zipfile
from contextlib import suppress
from enum import Enum
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_lowprec.checkpoints import files
from lightning_lowprec.checkpoints.folder import META, read_table
from lightning_lowprec.checkpoints.load import open_checkpoint
from lightning_lowprec.checkpoints.weights import open_weights
from lightning_lowprec.tools.cli import main
from tests.checkpoints.test_hostile_configs import STRANGE

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD detected"
)
SAFE, UNSAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class Runs:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


class Config:
    """What users put into checkpoints: an object of their own class."""


@pytest.fixture
def folder(tmp_path):
    """As torch and Lightning write folders, and this package before it wrote manifests."""
    layer = nn.Linear(8, 4)
    optimizer = {"state": {"weight": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": ["weight"]}]}
    save({"model": layer.state_dict(), "optimizer": optimizer}, checkpoint_id=tmp_path / "c")
    torch.save({"step": 3}, tmp_path / "c" / META)
    return tmp_path / "c"


class Pollutes:
    """Sets an attribute of torch's class when it is unpickled."""

    def __reduce__(self):
        return (Metadata, ({},), (None, {"version": "polluted"}))


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (os.system, ("touch {0}",), "posix.system"),
        (eval, ("__import__('os').system('touch {0}')",), "builtins.eval"),
        (functools.partial, (os.system, "touch {0}"), "functools.partial"),
        (torch.hub.load, ("{0}", "main"), "torch.hub.load"),
        (pickle.loads, (b"",), "_pickle.loads"),
    ],
)
@pytest.mark.parametrize("weights_only", [None, True])
def test_a_table_runs_no_code(folder, tmp_path, function, args, name, weights_only):
    witness = tmp_path / "ran"
    args = [arg.format(witness) if isinstance(arg, str) else arg for arg in args]
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(function, *args)))
    remedy = "pass `weights_only=False`" if weights_only is None else r"you pass True"
    with pytest.raises(pickle.UnpicklingError, match=rf"/c/\.metadata' names {name}.*{remedy}"):
        open_checkpoint(folder, weights_only)
    assert not witness.exists()


def test_a_trusted_table_may(folder, tmp_path, monkeypatch):
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(os.system, f"touch {tmp_path / 'ran'}")))
    for weights_only in (False, None):
        with pytest.raises(ValueError, match=r"\.metadata' is damaged, or is no table of contents"):
            open_checkpoint(folder, weights_only)
        (tmp_path / "ran").unlink()  # it was there
        monkeypatch.setenv(UNSAFE, "1")


OF_A_CLASS = f"c{Metadata.__module__}\nMetadata\n(N(S'version'\nS'polluted'\ndtb.".encode()
"""The opcodes that set an attribute of the class and not of an object."""


@pytest.mark.parametrize("content", [pickle.dumps(Pollutes()), OF_A_CLASS])
def test_a_table_changes_no_class(folder, content):
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata' is damaged"):
        open_checkpoint(folder)
    assert Metadata.version is None


class OfPython311(pickle.Pickler):
    """Writes the members of an Enum by `getattr`, as some versions of Python do."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_getattr_gives_members_of_an_enum_and_nothing_else(folder):
    metadata = FileSystemReader(folder).read_metadata()
    OfPython311(content := io.BytesIO(), 3).dump(metadata)
    of_python_313 = re.sub(rb"cpathlib(\._local)?\nPosix", b"cpathlib._local\nWindows", content.getvalue())
    (folder / ".metadata").write_bytes(of_python_313)
    assert read_table(folder, None).storage_data == metadata.storage_data
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(getattr, Metadata, "__init__")))
    with pytest.raises(ValueError, match=r"\.metadata' is damaged, or is no table of contents: '__init__'"):
        open_checkpoint(folder)


def test_a_piece_of_another_shape_and_a_file_outside_of_the_folder_are_refused(folder):
    metadata = FileSystemReader(folder).read_metadata()
    weight = metadata.state_dict_metadata["model.weight"]
    weight.size = weight.chunks[0].sizes = torch.Size([4, 1])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"distcp' is damaged.* a piece of 'model.weight' has the shape \(4, 8\)"):
        open_checkpoint(folder).model("model", nn.Linear(1, 4).state_dict())
    outside = [{"relative_path": name} for name in ("../secret", "/etc/passwd", "", "a/../../b", r"..\secret")]
    for change in (*outside, {"relative_path": "__0_0.distcp", "transform_descriptors": ["zstd"]}):
        for info in metadata.storage_data.values():
            vars(info).update(change)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        said = "the file .* is not in the folder" if change in outside else "its tensors are compressed"
        with pytest.raises(ValueError, match=f"is no table of contents: {said}"):
            open_checkpoint(folder)


def test_a_damaged_shard_of_a_foreign_folder_is_named(folder):
    for size in (200, 0):
        os.truncate(folder / "__0_0.distcp", size)
        with pytest.raises(ValueError, match=r"/c/__0_0\.distcp' is damaged, or belongs to another save"):
            open_checkpoint(folder).model("model", nn.Linear(8, 4).state_dict())
    for name in ("__0_0.distcp", ".metadata"):
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=rf"/c/{re.escape(name)}' is missing"):
            open_checkpoint(folder).model("model", nn.Linear(8, 4).state_dict())


@pytest.fixture(params=["folder", "file"])
def with_an_object(request, folder):
    """A checkpoint with an object of the user's own class, as litgpt's has, and where that object lies."""
    file = folder / META if request.param == "folder" else folder.with_suffix(".ckpt")
    torch.save({"model": nn.Linear(8, 4).state_dict(), "config": Config()}, file)
    return folder if request.param == "folder" else file, file


def test_an_object_is_refused_with_the_ways_out(with_an_object, monkeypatch):
    path, file = with_an_object
    refused = f"'{re.escape(str(file))}' holds an object of tests.checkpoints.test_untrusted_checkpoints.Config"
    ways = f"pass `weights_only=False` where you load, or set the environment variable {UNSAFE}=1"
    for opens in (open_checkpoint, open_weights):
        with pytest.raises(pickle.UnpicklingError, match=f"{refused}.*{ways}.*add_safe_globals"):
            opens(path)
    assert isinstance(open_checkpoint(path, weights_only=False).rest["config"], Config)
    with torch.serialization.safe_globals([Config]):
        assert isinstance(open_checkpoint(path).rest["config"], Config)
    monkeypatch.setenv(SAFE, "1")
    with pytest.raises(pickle.UnpicklingError, match=f"{SAFE} forbids to read them; if you trust the file, unset it"):
        open_checkpoint(path, weights_only=False)


@pytest.mark.parametrize("value", ["1", "True", "y", "YES"])
def test_the_variable_of_torch_is_honoured(with_an_object, monkeypatch, value):
    path, _ = with_an_object
    monkeypatch.setenv(UNSAFE, value)
    assert files.runs_code(None)
    for content in (open_checkpoint(path).rest, open_weights(path).content):
        assert isinstance(content["config"], Config)
    with pytest.raises(pickle.UnpicklingError, match=r"\(you pass True\)\. To allow"):
        open_checkpoint(path, weights_only=True)
    monkeypatch.setenv(SAFE, "1")
    with pytest.raises(RuntimeError, match="Only one of"):
        open_checkpoint(path)


def test_values_beside_tensors_follow_the_same_rule(folder, monkeypatch):
    groups = [{"lr": 0.1, "params": ["weight", "bias"], "schedule": Config()}]
    layer = nn.Linear(8, 4)
    save({"model": layer.state_dict(), "optimizer": {"state": {}, "param_groups": groups}}, checkpoint_id=folder / "d")
    shutil.copy(folder / META, folder / "d")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    refused = rf"__0_0\.distcp' holds an object of {__name__}.Config.*{UNSAFE}=1"
    with pytest.raises(pickle.UnpicklingError, match=refused):
        open_checkpoint(folder / "d").optimizer("optimizer", layer, optimizer)
    monkeypatch.setenv(UNSAFE, "1")
    found = open_checkpoint(folder / "d").optimizer("optimizer", layer, optimizer)
    assert isinstance(found["param_groups"][0]["schedule"], Config)


def damaged_files(folder):
    torch.save({"a.weight": torch.ones(32, 32), "none": torch.ones(0)}, folder / "whole.ckpt")  # a checksum of zero
    whole = (folder / "whole.ckpt").read_bytes()
    torch.save({"a.weight": torch.ones(32, 32)}, folder / "legacy.ckpt", _use_new_zipfile_serialization=False)
    legacy = (folder / "legacy.ckpt").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 64
    save_file({"a.weight": torch.ones(32, 32)}, folder / "whole.safetensors")
    tensors = (folder / "whole.safetensors").read_bytes()
    return {
        "empty.ckpt": (b"", "is damaged: the file is empty"),
        "cut.ckpt": (whole[:100], "is damaged, or was cut off while it was written or copied (100 bytes"),
        "half.ckpt": (whole[: len(whole) // 2], "is damaged, or was cut off"),
        "flipped.ckpt": (bytes(flipped), "Bad CRC-32 for file"),
        "text.ckpt": (b"{}", "is no file of `torch.save`, or is damaged (2 bytes"),
        "old.ckpt": (legacy[: len(legacy) // 2], "is no file of `torch.save`, or is damaged"),
        "cut.safetensors": (tensors[:2000], "is no file of safetensors, or is damaged"),
        "head.safetensors": (tensors[:20], "is no file of safetensors, or is damaged"),
    }


def test_a_damaged_file_is_named(tmp_path, capsys):
    for name, (content, expected) in damaged_files(tmp_path).items():
        path = tmp_path / name
        path.write_bytes(content)
        if path.suffix == ".ckpt":
            with pytest.raises(ValueError, match=f"'{re.escape(str(path))}'.*{re.escape(expected)}") as caught:
                open_checkpoint(path)
            assert "weights_only" not in str(caught.value), "it would not help"
        with pytest.raises(ValueError, match=f"^'{re.escape(str(path))}' .*{re.escape(expected)}"):
            open_weights(path)
        if name != "flipped.ckpt":  # a plan reads shapes, not values
            assert main(["plan", str(path)]) == 2
            assert str(path) in capsys.readouterr().err


def test_one_of_several_ranks_compares_each_record_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "READ_AT_ONCE", 8)  # several blocks, as large records have
    torch.save({name: torch.ones(8) for name in "abcd"}, tmp_path / "a.ckpt")
    for record in zipfile.ZipFile(tmp_path / "a.ckpt").infolist():
        damaged = bytearray((tmp_path / "a.ckpt").read_bytes())
        damaged[record.header_offset + 30 + sum(struct.unpack_from("<HH", damaged, record.header_offset + 26))] ^= 1
        (tmp_path / "damaged").write_bytes(damaged)
        seen = []
        for part in range(3):
            with suppress(ValueError):
                seen.append(files.check_records(tmp_path / "damaged", part, 3))
        assert seen == [True, True], record.filename


def test_a_file_that_is_larger_than_the_memory_is_not_called_damaged(tmp_path):
    torch.save({"a.weight": torch.zeros(2**24)}, tmp_path / "a.ckpt")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, before[1]))
    said = r"a.ckpt' has 67.1 MB, and this system maps no more than its memory and swap"
    try:
        with pytest.raises(OSError, match=said):
            files.read(tmp_path / "a.ckpt", None)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_files_in_the_oldest_format_and_files_without_checksums(tmp_path, caplog):
    weights = {"a.weight": torch.ones(32, 32)}
    torch.save(weights, tmp_path / "legacy.ckpt", _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    (tmp_path / "unchecked.ckpt").mkdir()  # and a run was killed while the file replaced this folder
    torch.save(weights, tmp_path / "unchecked.complete-while-saving.ckpt")
    torch.serialization.set_crc32_options(True)
    for name, file in (("legacy.ckpt", "legacy.ckpt"), ("unchecked.ckpt", "unchecked.complete-while-saving.ckpt")):
        with caplog.at_level("INFO"):
            assert torch.equal(open_checkpoint(tmp_path / name).rest["a.weight"], weights["a.weight"])
        assert f"{file}' was written without checksums; damage to it is not noticed" in caplog.text
        assert torch.equal(open_weights(tmp_path / name).whole("a.weight"), weights["a.weight"])


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
    for start, stop in [(i, j) for j in range(8) for i in range(j)]:
        assert torch.equal(source.rows("weight", start, stop), WHOLE[start:stop])
    linear = nn.Linear(5, 7, bias=False)
    assert torch.equal(open_checkpoint(quarters).model("model", linear.state_dict())["weight"], WHOLE)


CUTS = {
    "a piece is missing": lambda pieces: pieces[1:],
    "a piece is there twice": lambda pieces: [*pieces, pieces[0]],
    "a piece twice, another never": lambda pieces: [*pieces[:3], pieces[2]],
    "as many values as the tensor has, overlapping": lambda pieces: [*pieces[:3], ((1, 0), (3, 2)), ((4, 2), (3, 1))],
    "overlapping, cut by columns": lambda _: [((0, 0), (5, 2)), ((0, 2), (5, 1)), ((0, 3), (5, 2)), ((2, 0), (5, 2))],
    "outside": lambda pieces: [*pieces[:3], ((5, 2), (3, 3))],
    "before the start": lambda pieces: [((-1, 0), (4, 2)), *pieces[1:]],
    "a size below zero": lambda pieces: [((4, 2), (-4, -2)), *pieces[1:]],
    "another number of dimensions": lambda pieces: [((0,), (4,)), *pieces[1:]],
    "no piece": lambda _: [],
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
def test_pieces_that_do_not_hold_every_value_once(quarters, cut):
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
        open_checkpoint(quarters).model("model", nn.Linear(5, 7, bias=False).state_dict())
    with pytest.raises(ValueError, match=said):
        open_weights(quarters)


@pytest.mark.parametrize("size", [(), (0, 3), (5,)])
def test_tensors_without_dimensions_or_values(size, tmp_path):
    for name, value in (("c", 1.0), ("c.complete-while-saving", 2.0)):  # as a run leaves them that is killed in a save
        weights = {"a": torch.full(size, value), "version": 2}
        save({"model": weights, "ema": {"a": torch.full(size, 7.0)}}, checkpoint_id=tmp_path / name)
        torch.save({}, tmp_path / name / "meta.pt")
        assert torch.equal(open_weights(tmp_path / "c").whole("a"), torch.full(size, value))
    shutil.rmtree(tmp_path / "c")
    for key, value in ((None, 2.0), ("ema", 7.0)):
        assert torch.equal(open_weights(tmp_path / "c", key).whole("a"), torch.full(size, value))
    with pytest.raises(ValueError, match=r"saving' holds no weights under 'weights'; it has: ema, model\. Name"):
        open_weights(tmp_path / "c", "weights")


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


def test_a_file_without_weights_or_of_values_that_torch_cannot_read_is_named(tmp_path):
    torch.save({"model": {"a": WHOLE, "version": 2, 0: WHOLE}, "step": 3}, tmp_path / "a.ckpt")
    assert open_weights(tmp_path / "a.ckpt").shapes == {"a": (WHOLE.shape, WHOLE.dtype)}
    torch.save([1, 2], tmp_path / "list.pt")
    for name, key, said in (
        ("a.ckpt", "ema", "holds no weights under 'ema'; it has: 'model', 'step'. Name the right one with `--key`"),
        ("list.pt", None, "holds no weights under 'state_dict or model'; it has: list"),
        ("gone.ckpt", None, "is no file and no folder; expected a checkpoint"),
    ):
        with pytest.raises(ValueError, match=f"{name}'.*{said}"):
            open_weights(tmp_path / name, key)
    file = tmp_path / "four-bits.safetensors"
    file.write_bytes(safetensors({"a.weight": {"dtype": "F4", "shape": [8, 16], "data_offsets": [0, 64]}}))
    with pytest.raises(ValueError, match=r"'a\.weight' of '.*four-bits.safetensors' has the format F4"):
        open_weights(file)


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
        (folder / "model.safetensors.index.json").write_text(json.dumps(shown)[: -1 if index == 0 else None])
        with pytest.raises(ValueError, match=re.escape(str(folder))):
            open_weights(folder)
