"""``lowprec parity``: log-probabilities of the forward that trained, against those of an exported folder, per token.

checkpoint --weights--> forward of the precision, as in evaluation, on CPU
folder ----codes x scales--> the same forward                  "weights": differs if the export has rounded again
folder ----> transformers on CPU, as a server would read it    "served": differs by the server's arithmetic too
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_lowprec import names
from lightning_lowprec.checkpoints.weights import Shape, Source, open_weights
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.extras import require
from lightning_lowprec.numerics.weight_rounding import spread
from lightning_lowprec.private.either import Fabric
from lightning_lowprec.products.block import Block
from lightning_lowprec.serving.export import served_model
from lightning_lowprec.serving.sources import live_model
from lightning_lowprec.tools.export import tensors_of_model
from lightning_lowprec.tools.export_check import build, refuse_unchecked, tokens_of
from lightning_lowprec.tools.output import dumps, prints_to_stderr, working
from lightning_lowprec.tools.planning.source import load
from lightning_lowprec.torchao.wire_format import GatheredTiles


def run(args: Any) -> int:
    """Print both differences; return 1 if a bound is not held."""
    with prints_to_stderr(wanted=args.json), working(f"comparing {args.checkpoint} and {args.folder}"):
        tokens, found = _compared(args, Path(args.folder))
    failures = [
        f"the largest difference of '{what}' is {found[what]['max']:.4g}, above {bound:g}"
        for what, bound in (("weights", args.max_difference), ("served", args.max_served))
        if bound is not None and not found[what]["max"] <= bound  # NaN holds no bound
    ]
    if args.json:
        result = {"precision": args.precision, "tokens": tokens, **found, "failures": failures}
        print(dumps({**result, "holds": not failures}))
    else:
        print(f"{f'log-probabilities of {tokens} tokens, {args.precision}':<50} {'mean':>9} {'max':>9}")
        for what, how in (("weights", "the folder's, in the same forward"), ("served", "by transformers on CPU")):
            print(f"{f'{what}: {how}':<50} {found[what]['mean']:>9.3g} {found[what]['max']:>9.3g}")
        print(*(f"parity failed: {failure}" for failure in failures), sep="\n", end="\n" if failures else "")
    return int(bool(failures))


@torch.no_grad()
def _compared(args: Any, folder: Path) -> tuple[int, dict[str, dict[str, float]]]:
    skeleton = served_model(load(args.model or str(folder), {}).model)
    skeleton.tie_weights()
    refuse_unchecked(skeleton, "hf", args.text)
    text, wanted = tokens_of(folder, args.text, skeleton.config), live_model(skeleton).shapes
    known = {*skeleton.state_dict(), *(name for name, _ in skeleton.named_buffers())}
    stored = Decoded(open_weights(folder))
    models = [
        _converted(build(skeleton, tensors_of_model(source, wanted, known, None)[0]), args)
        for source in (open_weights(Path(args.checkpoint), args.key), stored)
    ]
    stored.multiply_by_codes(models[1].module)
    read = require("transformers", "lowprec parity").AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    trained, *others = (
        torch.log_softmax(model(text).logits[0, :-1].double(), -1).gather(1, text[0, 1:, None])
        for model in (*models, read.eval())
    )
    off = {what: (trained - other).abs() for what, other in zip(("weights", "served"), others, strict=True)}
    return len(trained), {what: {"mean": d.mean().item(), "max": d.max().item()} for what, d in off.items()}


def _converted(model: Any, args: Any) -> Any:
    chosen = {name: value for name, value in asdict(args.layers).items() if value != getattr(LayerOptions(), name)}
    how: dict[str, Any] = {"precision": args.precision}
    if args.precision in names.TABLE:
        row = names.TABLE[args.precision]
        how = {"plugins": row.plugin(**row.options, **chosen)}
    return Fabric(accelerator="cpu", devices=1, **how).setup_module(model).eval()


@final
class Decoded(Source):
    """The tensors of an exported folder under the model's names; codes are multiplied with their scales."""

    def __init__(self, stored: Source) -> None:
        self._stored, shapes = stored, dict(stored.shapes)
        super().__init__(shapes, self._rows)
        self._scales: dict[str, tuple[str, str]] = {}  # by the name of the weight: the names of codes and scales
        for codes, shape in stored.shapes.items():
            if shape.dtype == torch.float8_e4m3fn:
                stem = codes.removesuffix("_qdata")
                name = codes if stem == codes else stem.replace("._", ".")
                scales = next(stem + end for end in ("_scale", "_scale_inv") if stem + end in stored.shapes)
                for hidden in (codes, scales):
                    del shapes[hidden]
                shapes[name] = Shape(shape.size, torch.float32)
                self._scales[name] = codes, scales

    def multiply_by_codes(self, model: nn.Module) -> None:
        """Give layers with a scale per block the stored codes: their values, encoded again, get other scales."""
        for name, (codes, scales) in self._scales.items():
            layer: Any = model.get_submodule(name.rpartition(".")[0])
            by = getattr(getattr(layer, "products", None), "forward", None)
            if isinstance(by, Block):
                blocks = self._stored.whole(codes), self._stored.whole(scales).reciprocal()
                layer.weight = nn.Parameter(GatheredTiles(*blocks, by, torch.float32), requires_grad=False)

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        codes, scales = self._scales.get(name, (name, None))
        rows = self._stored.rows(codes, start, stop)
        if scales is None:
            return rows
        size = self.shapes[name].size
        return rows.float() * spread(self._stored.whole(scales), size).expand(size[0], -1)[start:stop]
