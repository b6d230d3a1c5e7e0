"""Train a model of transformers by its own code, export it, and load it back.

    python examples/transformers_model.py [cluster.workers=2 parallel.tp=2 key=value ...]

`model.hf` names a directory with a config.json of any causal language model, and weights if there are some. Here it is
a tiny Llama with random weights. Any of them trains with data parallelism, ZeRO and its own tensor-parallel plan.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import raytrain_hpc as rt


def write_model(directory: Path) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).save_pretrained(directory)


def main(words: list[str]) -> None:
    directory = Path("tiny_llama")
    if not directory.exists():
        write_model(directory)
    settings = ["run.name=transformers_model", f"model.hf={directory}", "cluster.workers=0", "train.steps=60"]
    settings += ["optimizer.lr=3e-3", "train.seq_len=64", "train.global_batch_size=16", "eval.samples=32"]
    result = rt.train(rt.load_config(None, [*settings, *words]))

    exported = Path(result.run_dir) / "exported"
    if not exported.exists():
        rt.export_model(result.run_dir, exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokens = torch.tensor([list(b"def ")])  # the built-in dataset has a token per byte
    sampled = model.generate(tokens, max_new_tokens=40, do_sample=True, temperature=0.8, pad_token_id=0)
    print(f"{result.outcome}: validation loss {result.val_loss:.3f}; {exported} has {type(model).__name__}")
    print(bytes(sampled[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main(sys.argv[1:])
