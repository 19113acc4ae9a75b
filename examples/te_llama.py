"""Train a small Llama of transformers in FP8 with Transformer Engine, and save a plain checkpoint.

    pip install '.[lightning,hf]'; pip install --no-build-isolation '.[lightning,te]'
    python examples/te_llama.py                                         # a GPU with FP8: Ada, Hopper, Blackwell
    python examples/te_llama.py --precision=fp8-current-te --hidden=2048 --layers=16
    python examples/te_llama.py --precision=fp8-hybrid                  # the same by torchao

The training text is the source code of Python's standard library, as bytes.
"""

import argparse

import lightning as L
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import lightning_lowprec  # noqa: F401  # makes "fp8-hybrid-te" and the other names known to Lightning
from lightning_lowprec.tools.demo import StdlibText


class Llama(L.LightningModule):
    def __init__(self, config: LlamaConfig, lr: float) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(config)
        self.lr = lr

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(input_ids=batch[0], labels=batch[0]).loss, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp8-hybrid-te")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", default="te_llama")
    args = parser.parse_args()

    L.seed_everything(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64, num_key_value_heads=args.hidden // 64, max_position_embeddings=256,
    )  # fmt: skip
    model = Llama(config, args.lr)
    trainer = L.Trainer(
        precision=args.precision, max_steps=args.steps, val_check_interval=args.steps, limit_val_batches=8,
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model, StdlibText())
    model.model.save_pretrained(args.out)  # plain names, plain dtypes: loads without Transformer Engine
    plain = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    print(f"saved to {args.out}: {sum(p.numel() for p in plain.parameters()):,} parameters, {plain.dtype}")


if __name__ == "__main__":
    main()
