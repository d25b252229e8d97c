"""FedDW's bidirectional LSTM for text."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fl_lightning.models.checks import require_dropout, require_size, require_tokens
from fl_lightning.models.layers import linear_head, mapping_layers
from fl_lightning.models.split import Body, SplitModel


class BiLSTM(SplitModel):
    """FedDW's bidirectional LSTM for IMDB, on token indices int64 [B, L].

    Embedding 10,000x128, dropout; LSTM with 128 units per direction; dropout; per token Linear 256→128 and ReLU; mean
    over all L tokens, padding included; Linear 128→128 = z; head 128→C. The paper's own runs have no bias in the head:
    set `head_bias: false` for them. The layer of every token is the first of the paper's two mapping layers, as in the
    authors' public code. Two feature maps, both sequences: [B, L, 128] and [B, L, 256].

    Args:
        input_shape: (length,) of a token sequence.
        num_classes: number of classes C.
        vocabulary_size: number of different tokens, special ones (padding, unknown) included.
        embedding: size of a token's vector.
        hidden: units per direction of the LSTM.
        dropout: probability of both dropouts, in [0, 1).
        token_mapping: size of the mapping layer that every token passes before the mean.
        mapping: sizes of the mapping layers after the mean; an empty list leaves them out.
        head_bias: whether the head has a bias.

    Raises:
        ConfigError: if a sample is no token sequence or a value is out of range.
    """

    paper = "Liu et al., FedDW (arXiv:2412.04521, 2024)"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        vocabulary_size: int,
        embedding: int = 128,
        hidden: int = 128,
        dropout: float = 0.2,
        token_mapping: int = 128,
        mapping: Sequence[int] | None = (128,),
        head_bias: bool = True,
    ) -> None:
        require_tokens("BiLSTM", input_shape)
        require_size("vocabulary_size", vocabulary_size)
        require_size("embedding", embedding)
        require_size("hidden", hidden)
        require_size("token_mapping", token_mapping)
        require_dropout("dropout", dropout)
        mapping_part, embedding_size = mapping_layers(token_mapping, mapping)
        body = Body(
            stages=[
                nn.Sequential(nn.Embedding(vocabulary_size, embedding), nn.Dropout(dropout)),
                BidirectionalLSTM(embedding, hidden),
            ],
            neck=nn.Sequential(
                nn.Dropout(dropout),
                nn.Linear(2 * hidden, token_mapping),
                nn.ReLU(),
                MeanOverTime(),
                *mapping_part,
            ),
        )
        super().__init__(
            body, linear_head(embedding_size, num_classes, head_bias), embedding_size, num_classes, input_shape
        )


class BidirectionalLSTM(nn.LSTM):
    """One LSTM layer in both directions that returns its outputs only: [B, L, E] → [B, L, 2H]."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return the outputs of all steps; the last hidden and cell states are not used."""
        outputs, _ = super().forward(x)
        return outputs


class MeanOverTime(nn.Module):
    """Mean over the tokens: [B, L, F] → [B, F]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean over the second axis."""
        return x.mean(dim=1)
