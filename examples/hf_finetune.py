"""Fine-tune a model of transformers in FP8, then load the result into the plain class.

    pip install '.[lightning,hf]'
    python examples/hf_finetune.py                                  # a small Llama from random weights
    python examples/hf_finetune.py --model=path/to/a/pretrained/folder --precision=fp8-rowwise

The training text is the source code of Python's standard library, as bytes.
"""

import argparse
from itertools import islice

import lightning as L
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import lightning_lowprec  # noqa: F401  # makes "fp8-hybrid" and the other names known to Lightning
from lightning_lowprec.tools.demo import StdlibText


def load(folder: str | None) -> torch.nn.Module:
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a pretrained folder; default: a small Llama from random weights")
    parser.add_argument("--precision", default="fp8-hybrid")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="hf_finetuned")
    args = parser.parse_args()

    fabric = L.Fabric(precision=args.precision)
    fabric.launch()
    fabric.seed_everything(0)

    model = load(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    wrapped, optimizer = fabric.setup(model, optimizer)

    text = StdlibText()
    text.setup("fit")
    batches = fabric.setup_dataloaders(text.train_dataloader())
    for step, (x, _) in enumerate(islice(batches, args.steps)):
        loss = wrapped(input_ids=x, labels=x).loss
        fabric.backward(loss)
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            fabric.print(f"step {step:4d}  loss {loss.item():.4f}")

    model.save_pretrained(args.out)  # plain names, plain dtypes
    plain = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    with torch.no_grad():
        loss = plain(input_ids=x.cpu(), labels=x.cpu()).loss
    fabric.print(f"loss of the saved model in float32, without this package: {loss.item():.4f}")


if __name__ == "__main__":
    main()
