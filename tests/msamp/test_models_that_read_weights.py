"""Models and adapters of other libraries that read or write the weight of a Linear by themselves, under MS-AMP."""

import lightning as L
import pytest
import torch

from lightning_lowprec import MSAMP
from lightning_lowprec.msamp.linear import scaled_linears
from tests.quality import sqnr

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
IDS = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries


def mamba():
    """Its mixer multiplies with ``dt_proj.weight`` itself."""
    config = transformers.MambaConfig(
        vocab_size=128, hidden_size=64, state_size=16, num_hidden_layers=1, time_step_rank=16
    )
    return transformers.MambaForCausalLM(config)


def t5():
    """It casts activations to the dtype of ``wo.weight``; here they are beyond the range of e4m3."""
    config = transformers.T5Config(
        vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(3000.0 if "wi.weight" in name else 1 / 3000.0 if "wo.weight" in name else 1.0)
    return model


def losses(make, plugin, steps=3):
    torch.manual_seed(0)
    model = make()
    fabric = L.Fabric(accelerator="cpu", devices=1, **plugin)
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-3))
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = wrapped(input_ids=IDS, labels=IDS).loss
        fabric.backward(loss)
        optimizer.step()
        found.append(loss.item())
    wrapped.eval()
    with torch.inference_mode():
        found.append(wrapped(input_ids=IDS, labels=IDS).loss.item())
    return found


@pytest.mark.parametrize("make", [mamba, t5])
def test_a_model_that_reads_weights_trains_as_in_float32(make):
    exact = losses(make, {"precision": "32-true"})
    found = {level: losses(make, {"plugins": MSAMP(level)}) for level in ("O2", "O3")}
    for level in found:
        assert found[level] == pytest.approx(exact, abs=0.05), level
    if make is t5:
        assert found["O3"][0] == found["O2"][0], "the same codes of e4m3"


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("safe", [False, True])
def test_an_adapter_is_merged_into_the_codes(level, safe):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )
    L.Fabric(accelerator="cpu", devices=1, plugins=MSAMP(level)).setup_module(model)
    assert len(scaled_linears(model)) == 7
    with torch.no_grad():
        base = model.eval()(input_ids=IDS).logits
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.3)
        adapted = model(input_ids=IDS).logits
        merged = model.merge_and_unload(safe_merge=safe)(input_ids=IDS).logits
    assert sqnr(adapted, merged) > sqnr(adapted, base) + 8  # dB; the base alone has lost the adapter
