"""The mixture's numbers of DRDFL.md, section 8 (tests 1 to 4 and 7), and what its term does with statistics."""

import math
from types import SimpleNamespace

import pytest
import torch
from sections import sectioned

from fl_lightning.building import build
from fl_lightning.core.client import ClientModule
from fl_lightning.core.facts import Facts
from fl_lightning.core.forward import Forward
from fl_lightning.core.message import Message
from fl_lightning.errors import ConfigError
from fl_lightning.losses.gaussian_mixture import (
    GaussianMixture,
    Mixture,
    VarianceMean,
    gaussian_log_density,
    gaussian_mixture_loss,
)
from fl_lightning.methods.apfl import APFL
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.perfedavg import PerFedAvg
from fl_lightning.methods.pfedme import pFedMe

Z = torch.tensor([[0.5, 0.5]])
MEAN = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]])
LOG_VARIANCE = torch.tensor([[1.0, 1.0], [0.25, 4.0], [1.0, 1.0]]).log()
TWO = (MEAN[:2], LOG_VARIANCE[:2])
FIRST = torch.tensor([0])
FOUNDER = SimpleNamespace(facts=Facts(num_clients=2, newcomers=1, client=0, round=1))
LATE_FOUNDER = SimpleNamespace(facts=Facts(num_clients=2, newcomers=1, client=0, round=2))
NEWCOMER = SimpleNamespace(facts=Facts(num_clients=2, newcomers=1, client=1, round=2))


def term(classes=3, features=2, seed=0, **options):
    made = GaussianMixture(**sectioned(GaussianMixture, **options))
    model = SimpleNamespace(num_classes=classes, embedding_size=features)
    made.setup(SimpleNamespace(model=model, facts=Facts(seed=seed), terms=[made]))
    return made


def know_classes(made, class_counts):
    made.prepare(None, SimpleNamespace(class_counts=class_counts))


def forward(z, y):
    return Forward(z, torch.tensor(y), [], z, z)


def statistics(mean, log_variance):
    return Message({}, {"class_mean": mean, "class_log_variance": log_variance})


def filled(made, mean, variance):
    with torch.no_grad():
        made.class_mean.fill_(mean)
        made.class_log_variance.fill_(math.log(variance))
    return made


def trained(made):
    made.receive(FOUNDER, Message())
    made.after_fit(None)
    return made


# --- values -----------------------------------------------------------------------------------------------------------


def test_log_density_matches_hand_computed_values():
    expected = pytest.approx([-2.0879, -2.3691, -3.0879], abs=5e-5)
    assert gaussian_log_density(Z, MEAN, LOG_VARIANCE)[0].tolist() == expected


@pytest.mark.parametrize(("y", "value"), [(0, 0.5624), (1, 0.8436)])
def test_classification_loss_of_two_classes(y, value):
    classification, likelihood = gaussian_mixture_loss(Z, torch.tensor([y]), *TWO)
    assert classification.item() == pytest.approx(value, abs=5e-5)
    assert likelihood.item() == pytest.approx((2.0879, 2.3691)[y], abs=5e-5)


@pytest.mark.parametrize(
    ("classes", "log_prior", "posterior"),
    [
        (2, None, [0.5699, 0.4301]),
        (3, None, [0.4711, 0.3556, 0.1733]),
        (2, torch.tensor([0.2, 0.8]).log(), [0.2488, 0.7512]),
        (3, torch.tensor([0.0, 0.0, -torch.inf]), [0.5699, 0.4301]),
    ],
)
def test_posterior_matches_hand_computed_values(classes, log_prior, posterior):
    """exp(−L_cls) of a class is its posterior; those of all classes sum to 1."""
    stats = (MEAN[:classes], LOG_VARIANCE[:classes])
    shares = [
        math.exp(-gaussian_mixture_loss(Z, torch.tensor([y]), *stats, log_prior)[0].item())
        for y in range(len(posterior))
    ]
    assert shares == pytest.approx(posterior, abs=5e-5)
    assert sum(shares) == pytest.approx(1, abs=1e-6)


def test_sum_of_both_losses_and_its_gradients_match_hand_computed_values():
    z, mean, log_variance = (t.clone().requires_grad_() for t in (Z, *TWO))
    loss = sum(gaussian_mixture_loss(z, FIRST, mean, log_variance))
    assert loss.item() == pytest.approx(2.6503, abs=5e-5)
    loss.backward()
    expected = (
        (z, [[1.5754, 0.7688]]),
        (mean, [[-0.7151, -0.7151], [-0.8603, -0.0538]]),
        (log_variance, [[0.5363, 0.5363], [0.0, -0.2016]]),
    )
    for tensor, gradient in expected:
        torch.testing.assert_close(tensor.grad, torch.tensor(gradient), atol=1e-4, rtol=0)


def test_equal_gaussians_give_a_uniform_posterior():
    z = torch.randn(6, 2)
    loss, _ = gaussian_mixture_loss(z, torch.arange(6) % 5, torch.ones(5, 2), torch.full((5, 2), 0.3))
    assert loss.item() == pytest.approx(math.log(5))


def test_losses_are_means_over_the_batch():
    z, y = torch.randn(4, 2), torch.tensor([0, 1, 2, 1])
    whole = gaussian_mixture_loss(z, y, MEAN, LOG_VARIANCE)
    single = [gaussian_mixture_loss(z[i : i + 1], y[i : i + 1], MEAN, LOG_VARIANCE) for i in range(4)]
    for index in range(2):
        assert whole[index].item() == pytest.approx(sum(pair[index].item() for pair in single) / 4, rel=1e-5)


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [None, torch.tensor([0.2, 0.8]).log(), torch.tensor([-torch.inf, 0.0])])
def test_gradients_match_finite_differences(prior):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 3, generator=generator, dtype=torch.float64).requires_grad_() for n in (4, 2, 2)]
    y = torch.tensor([0, 1, 1, 1])
    torch.autograd.gradcheck(lambda z, m, s: gaussian_mixture_loss(z, y, m, s, prior), inputs)


def test_float64_stays_float64():
    assert gaussian_log_density(Z.double(), MEAN, LOG_VARIANCE).dtype == torch.float64


@pytest.mark.parametrize("extreme", [1e3, -1e3])
@pytest.mark.parametrize("log_variance", [0.0, 1e4, -1e4, math.inf])
def test_extreme_inputs_stay_finite(extreme, log_variance):
    z = torch.full((2, 64), extreme, requires_grad=True)
    stats = [t.requires_grad_() for t in (torch.randn(3, 64), torch.full((3, 64), log_variance))]
    loss = sum(gaussian_mixture_loss(z, torch.tensor([0, 2]), *stats))
    loss.backward()
    assert all(t.isfinite().all() for t in (loss, z.grad, stats[0].grad, stats[1].grad))


def test_log_variance_is_clamped_at_6():
    for sign in (1, -1):
        beyond, bound = (gaussian_log_density(Z, MEAN, torch.full_like(MEAN, sign * v)) for v in (50.0, 6.0))
        assert torch.equal(beyond, bound)


def test_class_that_the_prior_masks_still_counts_for_its_own_samples():
    prior = torch.tensor([-torch.inf, 0.0])
    z = Z.clone().requires_grad_()
    loss, _ = gaussian_mixture_loss(z, FIRST, *TWO, prior)
    loss.backward()
    assert loss.item() == pytest.approx(0.5624, abs=5e-5)
    assert z.grad.isfinite().all()


def test_one_class_has_nothing_to_classify():
    classification, likelihood = gaussian_mixture_loss(Z, FIRST, MEAN[:1], LOG_VARIANCE[:1])
    assert classification.item() == 0.0
    assert likelihood.item() == pytest.approx(2.0879, abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_give_finite_float32(dtype):
    """300² is more than a float16 holds."""
    z = torch.full((2, 2), 300.0, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        density = gaussian_log_density(z, MEAN, LOG_VARIANCE)
        loss = sum(gaussian_mixture_loss(z, torch.tensor([0, 1]), MEAN, LOG_VARIANCE))
    loss.backward()
    assert density.dtype == loss.dtype == torch.float32
    assert torch.equal(density, gaussian_log_density(z.float(), MEAN, LOG_VARIANCE))
    assert loss.isfinite()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize(("mean", "log_variance"), [((3, 5), (3, 5)), ((3, 2), (2, 2))])
def test_sizes_that_do_not_fit_are_refused(mean, log_variance):
    with pytest.raises(ValueError, match=r"gaussian_log_density: `z` is \(1, 2\)"):
        gaussian_log_density(Z, torch.zeros(mean), torch.zeros(log_variance))


# --- the term ---------------------------------------------------------------------------------------------------------


def test_term_is_the_sum_of_its_parts():
    made = term(likelihood_weight=0.1)
    out = forward(torch.randn(4, 2), [0, 1, 2, 0])
    classification, likelihood = made.parts(out)
    assert made(None, out).item() == pytest.approx((classification + 0.1 * likelihood).item())
    assert torch.equal(term(likelihood_weight=0.0)(None, out), classification)


def test_statistics_have_the_model_s_size_unless_told():
    assert term(5, 7).class_mean.shape == (5, 7)
    assert term(5, 7, size=3).class_log_variance.shape == (5, 3)


def test_all_clients_begin_with_the_same_gaussians_and_no_stream_moves():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, other = term(10, 64), term(10, 64)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.class_mean, other.class_mean)
    assert not torch.equal(term(10, 64, seed=1).class_mean, one.class_mean)  # of the run's seed
    assert one.class_mean.mean().abs() < 0.1
    assert one.class_mean.std().item() == pytest.approx(1, abs=0.1)
    assert not one.class_log_variance.any()


def test_received_statistics_are_averaged_means_as_means_and_variances_as_variances():
    made = trained(term(1, 2))
    with torch.no_grad():
        made.class_mean.copy_(torch.tensor([[1.0, 2.0]]))
    made.receive(FOUNDER, statistics(torch.tensor([[3.0, -2.0]]), torch.full((1, 2), math.log(4))))
    assert made.class_mean[0].tolist() == pytest.approx([1.02, 1.96])
    assert made.class_log_variance.exp()[0].tolist() == pytest.approx([1.03, 1.03])
    assert made.class_log_variance[0].tolist() == pytest.approx([0.0296, 0.0296], abs=5e-5)


@pytest.mark.parametrize(("ema", "own"), [(1.0, True), (0.0, False)])
@pytest.mark.parametrize("ema_when", ["round", "step"])
def test_average_of_weight_1_ignores_and_of_weight_0_copies(ema, own, ema_when):
    made = trained(filled(term(ema=ema, ema_when=ema_when), 0.7, 1.3))
    mine, theirs = (torch.full((3, 2), value) for value in (0.7, -0.3))
    before = made.class_log_variance.detach().clone()
    made.receive(FOUNDER, statistics(theirs, theirs))
    made.parts(forward(Z, [0]))
    assert torch.equal(made.class_mean, mine if own else theirs)
    assert torch.equal(made.class_log_variance, before if own else theirs)


def test_equal_statistics_stay_equal_to_the_bit():
    made = trained(term(4, 50))
    with torch.no_grad():
        made.class_log_variance.normal_()
    before = [made.class_mean.detach().clone(), made.class_log_variance.detach().clone()]
    made.receive(FOUNDER, statistics(*before))
    assert torch.equal(made.class_mean, before[0])
    assert torch.equal(made.class_log_variance, before[1])


def test_newcomer_that_never_took_part_copies():
    made = filled(term(), 0.0, 1.0)
    theirs = torch.full((3, 2), 0.25)
    made.receive(NEWCOMER, statistics(theirs, theirs))
    assert torch.equal(made.class_mean, theirs)
    assert torch.equal(made.class_log_variance, theirs)
    made.class_mean.data.zero_()
    assert theirs.all()  # a copy


@pytest.mark.parametrize("host", [FOUNDER, LATE_FOUNDER], ids=["first round", "later"])
def test_founder_moves_whenever_it_is_first_drawn(host):
    made = filled(term(ema=0.5), 0.0, 1.0)
    made.receive(host, statistics(torch.ones(3, 2), torch.zeros(3, 2)))
    assert (made.class_mean == 0.5).all()


def test_nothing_received_changes_nothing():
    for made in (term(), trained(term()), trained(term(ema_when="step"))):
        made.receive(LATE_FOUNDER, statistics(torch.ones(3, 2), torch.ones(3, 2)))
        before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
        made.receive(FOUNDER, Message())
        know_classes(made, before["class_count"])
        made.parts(forward(Z, [0]))
        assert all(torch.equal(before[name], tensor) for name, tensor in made.state_dict().items())


def test_average_before_every_step_moves_in_steps():
    made = trained(filled(term(ema=0.5, ema_when="step"), 0.0, 1.0))
    made.receive(FOUNDER, statistics(torch.ones(3, 2), torch.zeros(3, 2)))
    assert not made.class_mean.any()  # not at the receive
    for expected in (0.5, 0.75):
        made.parts(forward(Z, [0]))
        assert made.class_mean[0, 0].item() == expected
    made.eval().parts(forward(Z, [0]))
    assert made.class_mean[0, 0].item() == 0.75


@pytest.mark.parametrize("update_absent", [False, True])
def test_absent_class_gets_a_gradient_only_if_asked_for(update_absent):
    made = term(update_absent=update_absent)
    know_classes(made, torch.tensor([3, 2, 0]))
    made(None, forward(torch.randn(4, 2), [0, 1, 1, 0])).backward()
    for parameter in (made.class_mean, made.class_log_variance):
        assert parameter.grad[:2].all()
        assert bool(parameter.grad[2].any()) == update_absent


def test_class_of_the_client_that_the_batch_lacks_gets_a_gradient():
    made = term()
    know_classes(made, torch.tensor([3, 2, 1]))
    made(None, forward(torch.randn(2, 2), [0, 1])).backward()
    assert made.class_mean.grad[2].any()


def test_no_optimizer_moves_an_absent_class():
    made = term()
    know_classes(made, torch.tensor([3, 2, 0]))
    before = [p.detach().clone() for p in (made.class_mean, made.class_log_variance)]
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, weight_decay=0.5, momentum=0.9)
    for _ in range(2):
        out = forward(torch.randn(4, 2), [0, 1, 1, 0])
        optimizer.zero_grad()
        made(None, out).backward()
        optimizer.step()
        made.observe(None, out)
    for parameter, old in zip((made.class_mean, made.class_log_variance), before, strict=True):
        assert torch.equal(parameter[2], old[2])
        assert not torch.equal(parameter[:2], old[:2])


@pytest.mark.parametrize(("method", "cohort"), [(APFL, None), (pFedMe, None), (PerFedAvg, None), (FedAvg, 2)])
def test_no_method_moves_an_absent_class(method, cohort, mlp, make_data, run_federation, sgd):
    """These show the term a pass before they step on it: weight decay drew the first Gaussians to 0."""
    make = lambda: method(mlp(), extra_terms=[GaussianMixture()])  # noqa: E731
    data = make_data(counts=((9, 8, 0, 0), (0, 0, 9, 8)))
    loop = run_federation(make, rounds=1, data=data, optimizer=sgd(0.1, weight_decay=0.5), cohort=cohort)
    first = ClientModule(make()).method.terms[1].class_mean
    for client, absent in ((0, [2, 3]), (1, [0, 1])):
        sent = loop.diary.sent[1, client].artifacts["class_mean"]
        assert torch.equal(sent[absent], first[absent])
        held = [own for own in range(4) if own not in absent]
        assert not torch.equal(sent[held], first[held])


def test_term_knows_the_client_s_classes_before_it_has_seen_one(mlp, make_data, run_federation):
    """It counted the labels that it saw, on several devices each its own ones, and over all rounds."""
    data = make_data(counts=((9, 8, 0, 1), (0, 0, 9, 8)), test_fraction=0.0)
    loop = run_federation(lambda: FedAvg(mlp(), extra_terms=[GaussianMixture()]), rounds=2, data=data, local_epochs=2)
    known = [loop.runner.pool.get(client)["terms.1.class_count"].tolist() for client in (0, 1)]
    assert known == [[9, 8, 0, 1], [0, 0, 9, 8]]


def test_local_prior_is_the_label_frequency():
    made = term(2, class_prior="local")
    know_classes(made, torch.tensor([1, 4]))
    with torch.no_grad():
        made.class_mean.copy_(MEAN[:2])
        made.class_log_variance.copy_(LOG_VARIANCE[:2])
    assert math.exp(-made.parts(forward(Z, [0]))[0].item()) == pytest.approx(0.2488, abs=5e-5)
    know_classes(made, torch.tensor([5, 0]))
    assert made._log_prior().exp().tolist() == pytest.approx([1.0, 1e-6])


def test_posterior_of_present_classes_leaves_the_others_out():
    made = term(posterior_classes="present")
    know_classes(made, torch.tensor([4, 1, 0]))
    with torch.no_grad():
        made.class_mean.copy_(MEAN)
        made.class_log_variance.copy_(LOG_VARIANCE)
    assert made.parts(forward(Z, [0]))[0].item() == pytest.approx(0.5624, abs=5e-5)


def test_stored_log_variance_is_clamped_after_a_step():
    made = term()
    know_classes(made, torch.ones(3, dtype=torch.long))
    with torch.no_grad():
        made.class_log_variance.copy_(torch.tensor([[-9.0, 9.0]]).expand(3, 2))
    made.observe(None, forward(Z, [0]))
    assert made.class_log_variance[0].tolist() == [-6.0, 6.0]


def test_term_sends_copies_of_its_two_tensors():
    made = term(4, 5)
    sent = made.send(None, None)
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == made.interface(None)
    assert set(sent) == {"class_mean", "class_log_variance"}
    sent["class_mean"].zero_()
    assert made.class_mean.any()


class Other(GaussianMixture):
    """Of somebody's own."""


def test_second_mixture_is_refused(mlp):
    """It sent its Gaussians in the first one's place."""
    with pytest.raises(ConfigError, match=r"may hold one GaussianMixture: .*, got .*'gaussian_mixture', 'other'"):
        ClientModule(FedAvg(mlp(), extra_terms=[GaussianMixture(), Other()]))
    ClientModule(FedAvg(mlp(), extra_terms=[GaussianMixture(), Other(0.0)]))


def test_server_averages_log_variances_as_variances():
    rule = VarianceMean()
    assert rule.result(Z) is Z
    rule.add(torch.tensor([1.0]).log(), 99)
    rule.add(torch.tensor([4.0]).log(), 1)
    assert rule.result(None).exp().item() == pytest.approx(1.03)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("weight", -1.0), ("likelihood_weight", -0.1), ("ema", 1.1), ("ema", float("nan")), ("ema_when", "epoch"),
        ("class_prior", "global"), ("posterior_classes", "own"), ("size", 0),
    ],
)  # fmt: skip
def test_term_rejects(option, value):
    owner = "Mixture" if option in Mixture.__annotations__ else "GaussianMixture"
    with pytest.raises(ConfigError, match=rf"^{owner}\.{option}.*got"):
        GaussianMixture(**sectioned(GaussianMixture, **{option: value}))


def test_configured_option_is_refused_where_it_is_written():
    node = {"class_path": "fl_lightning.losses.gaussian_mixture.GaussianMixture", "init_args": {"mixture": {"ema": 2}}}
    with pytest.raises(ConfigError, match=r"^method\.extra_terms\.0\.init_args\.mixture\.ema: must be in"):
        build([node], "method.extra_terms")


# --- on another method, around a server -------------------------------------------------------------------------------


def test_term_on_fedavg_trains_exchanges_and_resumes(mlp, assert_resumes):
    method = lambda: FedAvg(mlp(), extra_terms=[GaussianMixture(0.1)])  # noqa: E731
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
    straight = assert_resumes(method, rounds=4, optimizer=adam)
    losses = [row["loss/gaussian_mixture"] for row in straight.diary.rows]
    assert losses[-1] < losses[0]
    assert set(straight.exchange.global_message().artifacts) == {"class_mean", "class_log_variance"}


def test_term_of_weight_0_on_fedavg_is_fedavg(mlp, run_federation, outcome, assert_identical):
    plain = run_federation(lambda: FedAvg(mlp()))
    other = run_federation(lambda: FedAvg(mlp(), extra_terms=[GaussianMixture(0.0)]))
    assert_identical(outcome(other), outcome(plain))
