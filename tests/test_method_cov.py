"""Clip-Cov and KL-Cov: covariances and choices by hand, across ranks, in the gradient, in the second update."""

import pytest
import torch
from method_batches import batch_of, micro_of, random_batch, record_calls
from run_kit import weights
from trainer_kit import difference, make_episodes, make_model, make_trainer, with_episodes

from epo_trl.methods.covariance import ClipCov, KLCov, covariances

# Mean advantage 1, mean log-probability -2 over the five tokens; the last column does not count.
ADVANTAGES = torch.tensor([[3.0, 3.0, 3.0], [-2.0, -2.0, 9.0]])
LOGPS = [[-1.0, -4.0, -0.5], [-1.5, -3.0, -9.0]]
COVARIANCES = ([2.0, -4.0, 3.0], [-1.5, 3.0])


def hand_made(**others):
    return batch_of([[0, 0, 1], [0, 0, -1]], logps=LOGPS, **others)


def trainer_of(folder, name, settings, size=8, **changes):
    cut = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
    method = {"epo_lambda": 0.0, "entropy_method": [name], "method_kwargs": {name: settings}}
    return with_episodes(make_trainer(folder, **{**method, **cut, **changes}))


def test_covariances_by_hand():
    """The mean over tokens, and padding does not count."""
    got = covariances(ADVANTAGES, hand_made())
    assert (got[0].tolist(), got[1, :2].tolist()) == COVARIANCES


def test_clip_cov_by_hand():
    """Between 1 and 2.5 there is one token; between 1 and 5 there are three, of which two are drawn."""
    one = ClipCov(share=1.0, high=2.5).modify_advantages(ADVANTAGES, hand_made())
    assert torch.equal(one.advantages, torch.tensor([[0.0, 3.0, 3.0], [-2.0, -2.0, 9.0]]))
    assert one.metrics == {"clip-cov/candidates": 0.2, "clip-cov/clipped": 0.2}
    drawn = set()
    for rl_step in range(20):
        two = ClipCov(share=0.4).modify_advantages(ADVANTAGES, hand_made(rl_step=rl_step))
        places = (two.advantages == 0).nonzero().tolist()
        drawn.add(str(places))
        assert len(places) == 2 and all(place in ([0, 0], [0, 2], [1, 1]) for place in places)
        assert two.metrics == {"clip-cov/candidates": pytest.approx(0.6), "clip-cov/clipped": pytest.approx(0.4)}
    assert len(drawn) == 3, "each pair at some RL step"
    assert (ClipCov().modify_advantages(ADVANTAGES, hand_made()).advantages == 0).sum() == 1, "at least one"


def test_the_draw_repeats_and_goes_by_the_seed_of_the_run():
    advantages, batch = random_batch(rl_step=3)
    settings = {"share": 0.1, "low": 0.01}
    first, again, other = (
        ClipCov(**settings, seed=s).modify_advantages(advantages, batch).advantages for s in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_kl_cov_by_hand():
    """Of equal covariances the first is marked."""
    for share, marked in (
        (0.0, [[0, 0, 0], [0, 0, 0]]),
        (0.001, [[0, 0, 1], [0, 0, 0]]),
        (0.4, [[0, 0, 1], [0, 1, 0]]),
        (0.6, [[1, 0, 1], [0, 1, 0]]),
        (1.0, [[1, 1, 1], [1, 1, 0]]),
    ):
        shaped = KLCov(share=share).modify_advantages(ADVANTAGES, hand_made())
        assert torch.equal(shaped.advantages, ADVANTAGES)
        assert torch.equal(shaped.token_annotations["marked"].long(), torch.tensor(marked))
        assert shaped.metrics == {"kl-cov/marked": pytest.approx(torch.tensor(marked).sum().item() / 5)}


def test_the_penalty_of_kl_cov_and_its_gradient_by_hand():
    """0.5 * |log r| on marked tokens, with weight 1/4; a difference of rounding is none."""
    logps = torch.tensor([[-1.0, -2.0, -3.0, -4.0]], requires_grad=True)
    old = torch.tensor([[-1.5, -1.0, -1.0, -4.00001]])
    marked = {"marked": torch.tensor([[True, True, False, True]])}
    micro = micro_of(torch.zeros(1, 4), logps=logps, old_logps=old, policy_mean=torch.mean, token_annotations=marked)
    term = KLCov(coefficient=0.5).loss(micro)
    term.backward()
    assert term.item() == pytest.approx(0.5 * (0.5 + 1.0) / 4)
    torch.testing.assert_close(logps.grad, torch.tensor([[0.125, -0.125, 0.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_of_logits_is_no_distance(dtype):
    """Two passes whose logits differ by their rounding alone have no penalty; a change of 0.2 nats has."""
    generator = torch.Generator().manual_seed(0)
    logits = (2.5 * torch.randn(400, 64, generator=generator, dtype=torch.float64)).clamp(-6, 6)
    noise = torch.finfo(dtype).eps / 2 * (torch.rand(logits.shape, generator=generator) - 0.5)
    rounded = ((x.to(dtype).float()).log_softmax(-1)[None, :, 0] for x in (logits, logits * (1 + noise)))
    old, logps = rounded
    marked = {"marked": torch.ones_like(old, dtype=torch.bool)}
    if dtype is not torch.float32:
        assert ((old - logps).abs() > 1e-4).double().mean() > 0.5, "most tokens pass the threshold of float32"
    for moved in (0.0, 0.2):
        micro = micro_of(torch.zeros(1, 400), logps=logps + moved, old_logps=old, policy_mean=torch.mean,
                         token_annotations=marked, compute_dtype=dtype)  # fmt: skip
        assert KLCov().loss(micro).item() == pytest.approx(moved, abs=0.01 * moved)


@pytest.mark.parametrize(
    ("changes", "weights", "want"),
    [
        ({"bf16": True}, torch.float32, torch.bfloat16),
        ({}, torch.bfloat16, torch.bfloat16),
        ({}, torch.float32, torch.float32),
    ],
)
def test_methods_know_what_the_logits_were_computed_in(tmp_path, changes, weights, want):
    trainer = make_trainer(
        tmp_path, model=make_model().to(weights), entropy_method="kl-cov", num_iterations=2, max_steps=1, **changes
    )
    trainer.play = lambda tasks, **_: make_episodes()
    calls = record_calls(trainer.methods["kl-cov"], "loss")
    trainer.train()
    assert [micro.compute_dtype for (micro,), _ in calls] == [want]


def test_kl_cov_holds_back_in_the_second_update_however_the_batch_is_cut(tmp_path):
    def trained(settings, size=8):
        trainer = trainer_of(
            tmp_path, "kl-cov", settings, size, num_iterations=2, max_steps=2, lr_scheduler_type="constant"
        )
        trainer.args.optim = "sgd"
        trainer.train()
        return weights(trainer)

    settings = {"share": 0.2, "coefficient": 2.0}
    whole, cut, without = trained(settings), trained(settings, 2), trained({"coefficient": 0.0})
    assert difference(whole, cut) < 1e-4 < 1e-3 < difference(whole, without)
