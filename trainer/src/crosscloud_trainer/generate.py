"""Text from a result: what a newcomer wants to see after the first run."""

from __future__ import annotations

from pathlib import Path

from crosscloud_trainer.failures import invalid


def generate(folder: Path, prompt: str, tokens: int, seed: int, temperature: float) -> str:
    """The prompt and at most `tokens` more tokens; at temperature 0 always the likeliest one."""
    if not (folder / "config.json").is_file():
        raise invalid([f"DIR: {folder} holds no model (no config.json); give the folder `result` of a run"])
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise invalid([f"--prompt: found {prompt!r}; must be UTF-8 text"])
    import torch  # seconds of imports, only once it is clear that there is a model
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
    except Exception as fault:  # whatever the libraries make of files that are missing or broken
        words = " ".join(str(fault).split())[:300] or type(fault).__name__
        message = f"DIR: the model in {folder} can't be loaded: {words}; give the folder `result` of a run"
        raise invalid([message]) from fault
    ids = tokenizer(prompt, return_tensors="pt")
    limit = getattr(model.config, "max_position_embeddings", None)
    asked = ids["input_ids"].shape[1] + tokens
    if limit is not None and asked > limit:
        raise invalid([f"--tokens: {asked} tokens with the prompt are more than the model's {limit}; ask for less"])
    torch.manual_seed(seed)
    drawing = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    made = model.generate(**ids, max_new_tokens=tokens, **drawing)
    return str(tokenizer.decode(made[0], skip_special_tokens=True))
