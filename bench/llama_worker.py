"""llama.cpp as a worker of `bench.peer`: greedy decoding through `llama_batch`, by llama-cpp-python.

It runs in an environment of llama-cpp-python's own, and needs no lowroll.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.worker import channel, orders, timed

CELLS = 64  # of the cache, beyond what a row needs


class Decoder:
    """A model with a context for `rows` sequences. Flash attention, threads and the batch are as
    llama.cpp chooses them where the settings are silent."""

    def __init__(self, settings: dict[str, Any], folder: str) -> None:
        """settings: gguf, quantize (into Q8_0 first), rows, length (tokens of a row), threads."""
        import llama_cpp

        self.llama = llama_cpp
        llama_cpp.llama_backend_init()
        path = settings["gguf"]
        if settings["quantize"]:
            path = self._quantized(path, str(Path(folder, "q8_0.gguf")), settings["threads"])
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        rows, tokens = settings["rows"], settings["rows"] * (settings["length"] + CELLS)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = tokens, tokens, rows
        options.n_threads = options.n_threads_batch = settings["threads"]
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.model or not self.context:
            raise RuntimeError(f"llama.cpp does not load {path}")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocabulary))
        self.batch = llama_cpp.llama_batch_init(tokens, 0, 1)

    def _quantized(self, path: str, target: str, threads: int) -> str:
        options = self.llama.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = self.llama.LLAMA_FTYPE_MOSTLY_Q8_0, True
        options.nthread = threads
        if self.llama.llama_model_quantize(path.encode(), target.encode(), options):
            raise RuntimeError(f"llama.cpp does not quantize {path}")
        return target

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
        """Draw `new_tokens` tokens of each row; return the seconds of all but the first, and the
        processor's."""
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)
        tokens = [
            (token, position, row, position == len(ids) - 1)
            for row, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        last = self._step(tokens)

        def draw() -> None:
            nonlocal last
            for step in range(new_tokens - 1):
                last = self._step(
                    [(last[row], len(ids) + step, row, True) for row, ids in enumerate(prompts)]
                )

        return timed(draw)

    def _step(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run tokens (id, position, row, whether the next one is drawn); return those drawn."""
        import numpy as np

        batch, drawing = self.batch, []
        for i, (token, position, row, draws) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, draws
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            if draws:
                drawing.append(i)
        batch.n_tokens = len(tokens)
        if self.llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with {len(tokens)} tokens")
        logits = (self.llama.llama_get_logits_ith(self.context, i) for i in drawing)
        return [int(np.ctypeslib.as_array(one, (self.vocab_size,)).argmax()) for one in logits]


def main() -> None:
    settings, answer = channel()
    with tempfile.TemporaryDirectory() as folder:
        decoder = Decoder(settings, folder)
        answer({"vocab_size": decoder.vocab_size})
        for order in orders():
            answer(decoder.generate(order["prompts"], order["new_tokens"]))


if __name__ == "__main__":
    main()
