"""A model folder of any checkpoint of a job that has ended, the best one for example: its result with other weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from crosscloud_trainer.contract import StoredCheckpoint
from crosscloud_trainer.failures import invalid
from crosscloud_trainer.result import PROVENANCE
from crosscloud_trainer.storage import Storage


def export(result: Path, checkpoint: str, out: Path) -> int:
    """Write the folder `out`: model, tokenizer and settings of `result` with the weights of `checkpoint`, an address of
    a manifest.json or of its folder. `out` is whole or is not there. Returns the checkpoint's step. Raises
    Failure(INVALID_INPUT) with the name of the argument.
    """
    if out.exists():
        raise invalid([f"OUT: {out} is there already; name a folder that isn't"])
    try:
        told = json.loads((result / PROVENANCE).read_text())
    except (OSError, ValueError) as fault:
        raise invalid(
            [f"RESULT: {result} is no result of a job ({PROVENANCE}: {fault}); `crosscloud fetch` brings one"]
        ) from fault
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, which transformers loads, warns that there is no GPU
    import transformers  # seconds of imports, only once the arguments look right
    from transformers import AutoModelForCausalLM

    from crosscloud_trainer.checkpoint import MANIFEST, Checkpoint, Damaged
    from crosscloud_trainer.result import fill

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = checkpoint.removesuffix(MANIFEST).rstrip("/")
    uri = f"{folder}/{MANIFEST}"
    text = Storage(folder, "CHECKPOINT").read(MANIFEST) if folder else None
    if text is None:
        allowed = "give an address of `status.checkpoints[].uri`, or of the manifest.json in a local run's folder"
        raise invalid([f"CHECKPOINT: {checkpoint} isn't there; {allowed}"])
    digest = hashlib.sha256(text).hexdigest()
    try:
        found = Checkpoint(StoredCheckpoint(uri, digest, 1))
        if found.manifest["job"] != told["uid"]:
            raise invalid([f"CHECKPOINT: {checkpoint} is of job {found.manifest['job']}, RESULT of job {told['uid']}"])
        model = AutoModelForCausalLM.from_pretrained(result)
        fill(model, found)
    except (Damaged, ValueError, KeyError, OSError) as fault:
        raise invalid([f"CHECKPOINT: {checkpoint} doesn't go with {result}: {fault}"]) from fault
    draft = out.with_name(f"{out.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(result, draft, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    model.save_pretrained(draft)
    provenance = {**told, "checkpoint": uri, "sha256": digest}
    (draft / PROVENANCE).write_text(json.dumps(provenance, indent=1, sort_keys=True))
    draft.rename(out)
    return int(found.manifest["step"])
