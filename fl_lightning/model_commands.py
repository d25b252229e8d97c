"""``fl-lightning predict`` and ``export``: their options; what is wrong with them is said before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fl_lightning.commands import TRUST
from fl_lightning.errors import require
from fl_lightning.files import expanded
from fl_lightning.parser import OneLineParser, one_line_parser
from fl_lightning.trust import Trust

PREDICT = (
    "Predict the classes of new samples by a client's model, all clients' or the global one, normalised as in "
    "training. DATA is a folder of images or one image, .npz or .pt (x), a table (.csv, .tsv, .jsonl, .ndjson), or "
    ".txt (a text a line). The run's data set must be there."
)
EXPORT = (
    "Write a client's model, or the global one, as ONNX (.onnx; extra `export`) or TorchScript (.pt, .ts). It takes "
    "normalised inputs [N, …] and gives class scores [N, C]; classes and normalisation are in the file (about.json, or "
    "ONNX's metadata). What was written is run on test samples and compared with the model."
)
ENDINGS = (".onnx", ".pt", ".ts")


def predict(argv: Sequence[str]) -> int:
    """The command ``predict``.

    Args:
        argv: what follows it.

    Returns:
        0.

    Raises:
        ConfigError: if there is no such run, client or model, or the samples do not fit it.
    """
    parser = _parser("predict", PREDICT)
    parser.add_argument("data", type=str, help="the samples")
    parser.add_argument("--client", default="global", help="a client's number, all, or global (the default)")
    parser.add_argument("--output", default="predictions.csv", help="the CSV file; default: predictions.csv")
    parser.add_argument("--batch-size", type=int, default=512, help="samples at once")
    options = parser.parse_args(list(argv))
    folder, data, output = _run(options.run, "predict"), Path(options.data), expanded(options.output)
    require(options.batch_size >= 1, "--batch-size", "must be at least 1", options.batch_size)
    require(not output.is_dir(), "--output", "must be a file, as predictions.csv", options.output)
    named = options.client in ("all", "global") or options.client.isdecimal()
    require(named, "--client", "must be a client's number, all or global", options.client)
    require(data.exists(), "DATA", "there is no such file or folder", options.data)
    same = output.exists() and output.samefile(data)
    require(not same, "--output", "is DATA itself, whose samples it would replace; name another file", str(output))

    from fl_lightning.predicting import predict_run

    trust = Trust(tuple(options.trust))
    samples, rows = predict_run(folder, data, options.client, output, trust, options.batch_size)
    print(f"{samples} samples, {rows} predictions in {output}")
    return 0


def export(argv: Sequence[str]) -> int:
    """The command ``export``.

    Args:
        argv: what follows it.

    Returns:
        0.

    Raises:
        ConfigError: if there is no such run, client or model, or it cannot be exported.
    """
    parser = _parser("export", EXPORT)
    parser.add_argument("--client", default="global", help="a client's number, or global (the default)")
    parser.add_argument("--output", default="model.onnx", help="the file: .onnx, .pt, .ts; default: model.onnx")
    options = parser.parse_args(list(argv))
    folder, path = _run(options.run, "export"), expanded(options.output)
    named = options.client == "global" or options.client.isdecimal()
    require(named, "--client", "must be a client's number, or global", options.client)
    require(path.suffix in ENDINGS, "--output", "must end in .onnx, .pt or .ts", options.output)
    client = None if options.client == "global" else int(options.client)

    from fl_lightning.exporting import export_model

    difference = export_model(folder, path, client, Trust(tuple(options.trust)))
    checked = "not run: onnxruntime cannot be imported" if difference is None else f"scores differ by {difference:.1e}"
    print(f"written to {path} ({path.stat().st_size / 2**10:.0f} KiB; {checked})")
    return 0


def _parser(command: str, description: str) -> OneLineParser:
    parser = one_line_parser(command, description=description)
    parser.add_argument("run", type=str, help="a run's folder")
    parser.add_argument("--trust", metavar="PACKAGE", action="append", default=[], help=TRUST)
    return parser


def _run(folder: str, command: str) -> Path:
    require((Path(folder) / "config.yaml").is_file(), command, "there is no run in that folder", folder)
    return Path(folder)
