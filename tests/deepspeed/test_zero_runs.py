"""ZeRO 1, 2 and 3 on two gloo ranks: all parts run once, by `worker.py`."""

import pytest

from tests.deepspeed.parts import PARTS


@pytest.mark.parametrize("part", PARTS)
def test_two_ranks(seen, part):
    assert seen[part] == [None, None], "\n".join(map(str, seen[part]))


def test_the_log_names_the_format_of_the_products_of_each_precision_and_what_is_gathered(seen):
    lines = [line for line in seen["said"].splitlines() if "with float32 masters" in line]
    assert any(line.startswith("int8-mixed: ") and "; int8 is for matrix products alone" in line for line in lines)
    assert any(line.startswith("fp8-rowwise: ") and "; FP8 is for matrix products alone" in line for line in lines)
    assert not any(line.startswith("bf16-master: ") and "is for matrix" in line for line in lines)
    for line in (
        "ZeRO-3 keeps bf16 weights with float32 masters, gathers weights in bf16",
        "ZeRO-2 keeps fp16 weights with float32 masters, gathers updated weights in fp16 and scales the loss",
        "ZeRO-3 frees weights after each use: FP8 encodes them at every product",
        "the model keeps its low-precision layers and weights after `fit`, because DeepSpeed ZeRO-3 has sharded it",
    ):
        assert line in seen["said"]
