import copy

from tutorial_modules import DigitClassifier

from fl_lightning.federation.graphs import Ring
from fl_lightning.federation.remarks import remarks
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedlc import FedLC
from fl_lightning.methods.gpfl import GPFL
from fl_lightning.models.lightning_module import WrappedLightningModule


def test_ordinary_run_needs_no_remark(set_up_federation, mlp):
    assert list(remarks(set_up_federation(lambda: FedAvg(mlp())))) == []


def test_batch_that_no_client_can_fill_is_remarked(set_up_federation, make_data, mlp):
    loop = set_up_federation(lambda: FedAvg(mlp()), data=make_data(batch_size=100_000))
    assert list(remarks(loop)) == [
        f"data.batch_size: 100000 is more than any client has ({loop.num_train.max()} at most), so an epoch is one step"
    ]


def test_exchange_that_is_not_the_methods_own_is_remarked(set_up_federation, mlp):
    loop = set_up_federation(lambda: FedAvg(mlp()), exchange=Ring())
    assert list(remarks(loop)) == ["federation.exchange: Ring, where FedAvg is defined on Star"]


def test_a_modules_loss_that_does_not_count_is_remarked(set_up_federation):
    module = WrappedLightningModule((1, 8, 8), 4, DigitClassifier())
    line = "model: {} has a loss of its own, where what training_step returns does not count"
    for kind, said in ((FedAvg, []), (FedLC, [line.format("FedLC")]), (GPFL, [line.format("GPFL")])):
        assert list(remarks(set_up_federation(lambda kind=kind: kind(copy.deepcopy(module))))) == said
