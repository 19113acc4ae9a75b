"""Heads from hidden states on two gloo ranks: DDP, FSDP2, a head that FSDP2 gathers alone, and a user's own FSDP2."""

import lightning as L
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_lowprec import FabricFSDP2Strategy, HalfMixed
from lightning_lowprec.losses import linear_cross_entropy
from tests.conversion.test_head import build
from tests.fsdp2.ranks import run
from tests.fsdp2.toy import full
from tests.quality import sqnr

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]
CASES = {"ddp": False, "ddp, tied": True, "fsdp2": False, "fsdp2, tied": True, "fsdp2, head alone": False}


def batch(rank, micro):
    tokens = torch.randint(1, 300, (2, 12), generator=torch.Generator().manual_seed(10 * micro + rank))
    labels = tokens.clone()
    labels[:, :2] = -100
    return {"input_ids": tokens, "labels": labels}


def strategy(case):
    if case.startswith("ddp"):
        return "ddp"
    if case.endswith("alone"):
        wrap = ("lm_head", "model.layers.0")
        return FabricFSDP2Strategy(wrap=lambda fqn, module: fqn in wrap)
    return FabricFSDP2Strategy()


def trained(rank, case, head):
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy(case), plugins=HalfMixed("bf16", head=head))
    fabric.launch()
    model = build(tie_word_embeddings=CASES[case])
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []
    for micro in range(2):
        with fabric.no_backward_sync(model, enabled=micro == 0):
            loss = model(**batch(rank, micro)).loss
            fabric.backward(loss / 2)
        losses.append(loss.detach())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses), [full(p.detach()) for p in model.module.parameters()]


def by_hand(rank):
    """Gradients where the user shards, and computes the loss outside of the layer that holds the weight."""
    model = build("phi")  # whose head has a bias
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shards"))
    for part in (*model.model.layers, model.model, model.lm_head):
        fully_shard(part, mesh=mesh)
    head, data = model.lm_head, batch(rank, 0)
    hidden = model.model(data["input_ids"]).last_hidden_state
    linear_cross_entropy(hidden[:, :-1], head.weight, data["labels"][:, 1:], bias=head.bias).backward()
    return [full(p.grad) for p in model.parameters()]


def on_each_rank(rank):
    transformers.logging.set_verbosity_error()
    heads = dict.fromkeys(CASES, ("bf16", "chunked")) | {"fsdp2": ("bf16", "chunked", "fp8")}
    found = {(case, head): trained(rank, case, head) for case in CASES for head in heads[case]}
    return found, by_hand(rank)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run(on_each_rank, 2, tmp_path_factory.mktemp("heads"))


@pytest.mark.parametrize(("case", "head"), [*((case, "chunked") for case in CASES), ("fsdp2", "fp8")])
def test_ranks_train_as_with_all_logits(ranks, case, head):
    (losses, weights), (plain, expected) = ranks[0][0][case, head], ranks[0][0][case, "bf16"]
    torch.testing.assert_close(losses, plain, rtol=1e-6 if head == "chunked" else 2e-3, atol=0)
    start = list(build(tie_word_embeddings=CASES[case]).parameters())
    for made, wanted, before in zip(weights, expected, start, strict=True):
        moved = wanted - before.detach()
        assert sqnr(moved, made - before.detach()) >= (38 if head == "chunked" else 20)
    for one, other in zip(weights, ranks[1][0][case, head][1], strict=True):
        assert torch.equal(one, other)


def test_a_sharded_weight_outside_of_its_layer_gets_the_average_gradient(ranks):
    model = build("phi")
    for rank in range(2):
        (model(**batch(rank, 0)).loss / 2).backward()
    for parameter, gradient in zip(model.parameters(), ranks[0][1], strict=True):
        assert sqnr(parameter.grad, gradient) >= 100
