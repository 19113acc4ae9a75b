"""Train a small Llama in FP8, export the run's own FP8 codes, load them by transformers, compare, and generate.

    pip install '.[lightning,hf]'
    python examples/train_then_serve.py --out served
    vllm serve served                                # on a GPU with FP8; the tiny model of this example says nothing

The training text is the source code of Python's standard library, as bytes.
"""

import argparse

import lightning as L
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import lightning_lowprec
from lightning_lowprec.tools.demo import StdlibText


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.model = AutoModelForCausalLM.from_config(config)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp8-rowwise")
    parser.add_argument("--format", default="compressed-tensors")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="served")
    args = parser.parse_args()

    L.seed_everything(0)
    module = Module()
    trainer = L.Trainer(
        precision=args.precision, max_steps=args.steps, limit_val_batches=0, logger=False, enable_checkpointing=False
    )
    trainer.fit(module, StdlibText())

    exported = lightning_lowprec.export(module, args.out, format=args.format)
    print(exported.text())

    # what a server does for every update of its weights during RL: one tensor at a time, no second copy of the model
    sent = sum(t.numel() * t.element_size() for _, t in lightning_lowprec.fp8_state(module, format=args.format))
    print(f"one update of a running server sends {sent / 1e6:.2f} MB")

    served = AutoModelForCausalLM.from_pretrained(args.out, dtype="auto").eval()
    prompt = torch.tensor([list(b"def main(")])
    with torch.no_grad():
        reference = module.model.cpu().eval()(prompt).logits.float()
        difference = reference - served(prompt).logits.float()
    decibels = 10 * torch.log10(reference.square().sum() / difference.square().sum())
    print(f"logits of the served model: {decibels:.1f} dB from those of training")
    tokens = served.generate(prompt, max_new_tokens=20, do_sample=False)
    print(bytes(tokens[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
