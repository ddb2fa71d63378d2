"""Open saved models where neither hf_fp8 nor torchao can be imported, and say what came out.

opens_plainly.py OUT FOLDER...
"""

import sys
from pathlib import Path


def main(out: str, folders: list[str]) -> None:
    for blocked in ("hf_fp8", "torchao"):
        sys.modules[blocked] = None  # type: ignore[assignment]
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    found = {}
    for folder in folders:
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
        with torch.no_grad():
            logits = model(torch.arange(16)[None]).logits
        file = load_file(Path(folder) / "model.safetensors")
        found[folder] = {"dtype": model.dtype, "logits": logits, "file": file}
    torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
