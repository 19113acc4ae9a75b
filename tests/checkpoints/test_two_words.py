"""Two words in one run: a checkpoint of the first resumes under the second with its values, and trains as that word."""

import lightning as L
import pytest
import torch

from tests.checkpoints.test_gone_checkpoints import Model


def run(precision, steps, ckpt_path=None, callbacks=()):
    torch.manual_seed(0)
    model = Model()
    trainer = L.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", precision=precision, logger=False, callbacks=[*callbacks],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, ckpt_path=ckpt_path)
    return model, trainer


def step_by_hand(checkpoint):
    """The fourth step in plain torch, under autocast of bf16, from the weights and moments of a checkpoint."""
    model = Model()
    model.load_state_dict(checkpoint["state_dict"])
    optimizer = model.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    batch = next(iter(model.train_dataloader()))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.training_step(batch, 0)
    loss.backward()
    optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("words", [("bf16-mixed", "fp8-hybrid"), ("fp8-hybrid", "bf16-mixed")], ids=" to ".join)
def test_values_are_those_saved_and_the_next_step_is_that_of_the_second_word(words, tmp_path):
    first, trainer = run(words[0], steps=3)
    trainer.save_checkpoint(path := tmp_path / "first.ckpt")
    saved = torch.load(path, weights_only=True)
    resumed, trainer = run(words[1], 3, path)
    assert trainer.global_step == 3
    for name, value in first.state_dict().items():
        assert torch.equal(saved["state_dict"][name], value), name
        assert torch.equal(resumed.state_dict()[name], value), name
    further, trainer = run(words[1], 4, path)
    assert trainer.global_step == 4
    by_hand = step_by_hand(saved)
    same = [torch.equal(further.state_dict()[name], value) for name, value in by_hand.items()]
    assert all(same) == (words[1] == "bf16-mixed"), "FP8 rounds"
    for name, value in by_hand.items():
        assert not torch.equal(value, first.state_dict()[name]), name
        torch.testing.assert_close(further.state_dict()[name], value, rtol=0, atol=2e-3, msg=name)  # two steps of AdamW


def test_a_monitor_says_which_layers_ran_in_bf16(tmp_path):
    """A version that moved bad layers to bf16 in mid-run has saved their names."""
    from lightning_lowprec.callbacks import NumericsMonitor

    _, trainer = run("fp8-hybrid", 3, callbacks=[monitor := NumericsMonitor(every=1, log=False, folder=tmp_path)])
    trainer.save_checkpoint(path := tmp_path / "old.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"][monitor.state_key] = {"bad": {"up": 0, "down": 1}, "demoted": {"up": "bf16"}}
    torch.save(checkpoint, path)
    with pytest.warns(UserWarning, match=r"runs? in bf16. To go on so, resume with `FP8TorchAO\(keep=\['up'\]\)`"):
        run("fp8-hybrid", 3, path, [NumericsMonitor(every=1, log=False, folder=tmp_path)])
