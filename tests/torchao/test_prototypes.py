"""int8 and MXFP8 layers: bit for bit torchao's own modules, in place, with each product of three in bf16 or not."""

import pytest
import torch

from lightning_lowprec import FP8TorchAO, Int8TorchAO
from tests.torchao.test_mixed_gemms import IN, NO_MXFP8, OUT, converted, needs_mxfp8, plain, results
from tests.toys import convert


def torchaos(kind, layer):
    sizes = {"bias": layer.bias is not None, "dtype": layer.weight.dtype}
    if kind == "int8":
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig as Config
        from torchao.prototype.quantized_training.int8_mixed_precision import Int8MixedPrecisionTrainingLinear

        made = Int8MixedPrecisionTrainingLinear(IN, OUT, config=Config(module_swap=True), **sizes)
    else:
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        made = MXFP8Linear(IN, OUT, kernel_preference=KernelPreference.EMULATED, **sizes)
    made.load_state_dict(layer.state_dict())
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("kind", ["int8", pytest.param("mxfp8", marks=needs_mxfp8)])
def test_results_are_those_of_torchaos_module_bit_for_bit(kind, bias, dtype):
    """torchao's MXFP8 has a scale per row of our square tiles; uniform weights make them all one power of two."""
    theirs = torchaos(kind, plain(dtype, bias))
    ours = converted(kind, plain(dtype, bias))
    for tokens in (256, 13) if kind == "int8" else (256, 32):  # torchao's MXFP8 takes multiples of 32 tokens
        found, expected = results(ours, tokens, False), results(theirs, tokens, False)
        assert {name for name in found if not torch.equal(found[name], expected[name])} == set()
    if kind == "int8":  # of values in the dtype of autocast
        theirs = torchaos(kind, plain(torch.bfloat16, bias))
        assert torch.equal(results(ours)["forward"], results(theirs, autocast=False)["forward"])
    assert repr(ours.products) in repr(ours)


def test_sums_of_int8_products_do_not_overflow_fp16():
    layer, x = plain(bias=False), torch.ones(32, IN, requires_grad=True)
    torch.nn.init.uniform_(layer.weight, 0.5, 1.0)  # 127 * 127 * 128 * 0.75 is far above 65504
    (expected := layer(x)).sum().backward()
    expected = expected, x.grad, layer.weight.grad
    x.grad = layer.weight.grad = None
    with torch.autocast("cpu", torch.float16):
        (output := converted("int8", layer, base="fp16")(x)).sum().backward()
    for found, wanted in zip((output, x.grad, layer.weight.grad), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=0.01, atol=0)


def test_an_older_torchao_is_named_with_the_version_that_has_the_prototype(monkeypatch):
    if NO_MXFP8 is None:
        lacking = dict.fromkeys(("int8", "mxfp8"), ("9.9", ("torchao.float8.TheNewName",)))
        monkeypatch.setattr("lightning_lowprec.private.torchao._PROTOTYPES", lacking)
        kinds, name, version = ("int8", "mxfp8"), "torchao.float8.TheNewName", "9.9"
    else:  # the oldest torchao that is supported
        kinds, name, version = ("mxfp8",), "torchao.prototype.mx_formats.", "0.18"
    for kind in kinds:
        made = {"int8": Int8TorchAO, "mxfp8": FP8TorchAO}[kind](kind)
        message = rf"cannot run: torchao [\d.+a-z]+ does not have '{name}.*; torchao {version} has: `pip install"
        with pytest.raises(RuntimeError, match=message):
            convert(made, plain())
