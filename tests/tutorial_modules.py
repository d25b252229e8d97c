"""LightningModules as tutorials have them. They know nothing of fl_lightning."""

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torchvision.models.resnet import BasicBlock


class DigitClassifier(L.LightningModule):
    """A first classifier: three layers, Adam, accuracy on validation data."""

    def __init__(self, hidden_size: int = 16, learning_rate: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, hidden_size), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden_size, 4)
        )
        self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)

    def forward(self, x):
        return F.log_softmax(self.model(x), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.nll_loss(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_accuracy.update(self(x).argmax(dim=1), y)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


class AutoencoderClassifier(L.LightningModule):
    """An encoder with a decoder and a classifier; both losses are trained at once."""

    def __init__(self, latent: int = 6, share: float = 0.5):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 16), nn.ReLU(), nn.Linear(16, 64))
        self.classifier = nn.Linear(latent, 4)
        self.share = share

    def forward(self, x):
        return self.classifier(self.encoder(x.flatten(1)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        reconstruction = F.mse_loss(self.decoder(z), x)
        classification = F.cross_entropy(self.classifier(z), y)
        self.log_dict({"reconstruction": reconstruction, "classification": classification})
        return classification + self.share * reconstruction

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class SmallResNet(nn.Module):
    """A residual network of torchvision's blocks."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3, padding=1, bias=False)
        self.layer1 = BasicBlock(8, 8)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.fc(self.layer1(self.conv1(x)).mean(dim=(2, 3)))


class OneCycleNet(L.LightningModule):
    """A residual network, and a cycle of learning rates over all steps."""

    def __init__(self, lr: float = 0.05):
        super().__init__()
        self.save_hyperparameters()
        self.model = SmallResNet(num_classes=4)

    def forward(self, x):
        out = self.model(x)
        return F.log_softmax(out, dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        scheduler = OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class MeteredModel(L.LightningModule):
    """Metrics of torchmetrics in every loop, computed at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"hidden": nn.Linear(64, 12), "out": nn.Linear(12, 4)})
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=4)
        self.test_acc = self.train_acc.clone()

    def forward(self, x):
        return self.layers["out"](self.layers["hidden"](x.flatten(1)).relu())

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits.argmax(1), y)
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=False)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_epoch_end(self):
        self.log("train_acc_epoch", self.train_acc.compute())

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.test_acc.update(self(x).argmax(1), y)
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class FineTuned(L.LightningModule):
    """Transfer learning: a frozen backbone as feature extractor, a new head that is trained."""

    def __init__(self, lr: float = 0.1):
        super().__init__()
        backbone = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.feature_extractor = nn.Sequential(*backbone, nn.Flatten())
        for parameter in self.feature_extractor.parameters():
            parameter.requires_grad = False
        self.fc = nn.Sequential(nn.Linear(32, 16), nn.ReLU())
        self.classifier = nn.Linear(16, 4)
        self.lr = lr

    def forward(self, x):
        self.feature_extractor.eval()
        with torch.no_grad():
            representations = self.feature_extractor(x)
        return self.classifier(self.fc(representations))

    def training_step(self, batch):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        trainable = filter(lambda p: p.requires_grad, self.parameters())
        optimizer = torch.optim.SGD(trainable, lr=self.lr)
        return [optimizer], [StepLR(optimizer, step_size=1, gamma=0.5)]


class PlainModel(L.LightningModule):
    """The smallest there is: one layer, its loss in a dict, and every hook overridden."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 4)
        self.called = []

    def forward(self, x):
        return self.layer(torch.flatten(x, 1))

    def on_train_start(self):
        self.called.append("start")

    def on_train_epoch_start(self):
        self.called.append(f"epoch {self.current_epoch} of {self.trainer.max_epochs}")

    def on_train_batch_start(self, batch, batch_idx):
        self.called.append(f"batch {batch_idx}")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.called.append(f"batch {batch_idx} done")

    def on_train_epoch_end(self):
        self.called.append("epoch done")

    def on_train_end(self):
        self.called.append("end")

    def training_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": F.cross_entropy(self(x), y)}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]


class PlainTen(L.LightningModule):
    """Ten classes."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TextClassifier(L.LightningModule):
    """Word vectors, an LSTM, and its last state."""

    def __init__(self, vocabulary: int = 30, embedding: int = 8, hidden: int = 8, classes: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=0)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, classes)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens):
        _, (hidden, _) = self.lstm(self.embedding(tokens))
        return self.fc(torch.cat([hidden[-2], hidden[-1]], dim=1))

    def training_step(self, batch, batch_idx):
        tokens, labels = batch
        loss = self.loss(self(tokens), labels)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Tabular(L.LightningModule):
    """Features of a table: batch norm, dropout, weight decay for weights alone, a cosine over the epochs."""

    def __init__(self, features: int = 64, widths: tuple = (16, 8)):
        super().__init__()
        layers = []
        for width_in, width_out in zip((features, *widths), widths, strict=False):
            layers += [nn.Linear(width_in, width_out), nn.BatchNorm1d(width_out), nn.SiLU(), nn.Dropout(0.2)]
        self.body = nn.Sequential(nn.Flatten(), *layers)
        self.out = nn.Linear(widths[-1], 4)

    def forward(self, x):
        return self.out(self.body(x))

    def training_step(self, batch, batch_idx):
        features, target = batch
        return F.cross_entropy(self(features), target, label_smoothing=0.1)

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)]


class TwoOptimizers(L.LightningModule):
    """Manual optimization: one optimizer for the layers, one for the classifier, one loss each."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh())
        self.classifier = nn.Linear(16, 4)

    def forward(self, x):
        return self.classifier(self.layers(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = F.cross_entropy(self(x), y) + 1e-4 * self.layers[1].weight.square().sum()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        loss = F.cross_entropy(self(x), y)
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.lr_schedulers().step()
        self.log("train_loss", loss)

    def configure_optimizers(self):
        first = torch.optim.Adam(self.layers.parameters(), lr=1e-2)
        second = torch.optim.SGD(self.classifier.parameters(), lr=0.1)
        return [first, second], [LambdaLR(first, lambda step: 1 / (1 + 0.1 * step))]


class Mixup(L.LightningModule):
    """Images that are mixed in pairs; a plateau of the training loss lowers the learning rate."""

    def __init__(self, alpha: float = 0.4):
        super().__init__()
        self.alpha = alpha
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4))

    def forward(self, x):
        return self.net(x).softmax(dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        share = torch.distributions.Beta(self.alpha, self.alpha).sample().to(x.device)
        order = torch.randperm(len(x), device=x.device)
        logits = self.net(share * x + (1 - share) * x[order])
        loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "train_loss"}


class GAN(L.LightningModule):
    """A generator and a discriminator: no classifier."""

    def __init__(self, latent: int = 5):
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator = nn.Linear(latent, 64)
        self.discriminator = nn.Linear(64, 1)

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch):
        raise NotImplementedError


class Autoencoder(L.LightningModule):
    """Images from images: no classifier."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 64))

    def forward(self, x):
        return self.net(x.flatten(1))


class Noisy(nn.Module):
    """Noise on every input, when it is used, too."""

    def __init__(self):
        super().__init__()
        self.noise = 0.0
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        self.noise = 0.0 if len(x) == 2 else 1.0
        return self.fc((x + self.noise * torch.randn_like(x)).flatten(1))


class Batchwise(nn.Module):
    """Written down, it is for as many samples as it was written with."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(torch.stack([one.flatten() for one in x]))


class Attends(nn.Module):
    """Rows of an image that look at each other."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(self.encoder(x[:, 0]).flatten(1))


class Solves(nn.Module):
    """Does what ONNX has no operation for."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        matrices = x.flatten(1).unflatten(1, (8, 8)) + 99 * torch.eye(8)
        solved = torch.linalg.lstsq(matrices, matrices[..., :1], driver="gels")  # torch 2.6's own varies
        return self.fc(solved.solution.flatten(1))


class Reads(nn.Module):
    """Torch's encoder over an image's rows, of which the last is padding where its sum is negative."""

    def __init__(self, num_classes: int = 10):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        rows = x.flatten(1).view(-1, 8, 8)
        padding = torch.zeros(rows.shape[:2], dtype=torch.bool, device=x.device)
        padding[:, -1] = rows[:, -1].sum(1) < 0
        z = self.encoder(rows, src_key_padding_mask=padding)
        return self.fc((z * ~padding[..., None]).sum(1) / (~padding).sum(1, keepdim=True))


class Trims(nn.Module):
    """Cuts away the padding of its mini-batch; scores are the same whatever comes with a text."""

    def __init__(self, num_classes: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x):
        x = x[:, : int((x != 0).sum(1).max().clamp(min=1))]
        held = (x != 0)[..., None]
        return self.fc((self.embedding(x) * held).sum(1) / held.sum(1).clamp(min=1))
