"""A model folder of any checkpoint of a job that has ended, the best one for example: its result with other weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
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
        told = dict(json.loads((result / PROVENANCE).read_text()))
        uid = told["uid"]
    except (OSError, ValueError, TypeError, KeyError) as fault:
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
    folder = checkpoint.removesuffix(MANIFEST).rstrip("/") or "."
    uri = f"{folder}/{MANIFEST}"
    text = Storage(folder, "CHECKPOINT").read(MANIFEST)
    if text is None:
        allowed = f"give an address of `status.checkpoints[].uri`, or of a {MANIFEST} in a local run's folder"
        raise invalid([f"CHECKPOINT: {checkpoint} is no {MANIFEST} that is there; {allowed}"])
    digest = hashlib.sha256(text).hexdigest()
    try:
        found = Checkpoint(StoredCheckpoint(uri, digest, 1))
        if found.manifest["job"] != uid:
            raise invalid([f"CHECKPOINT: {checkpoint} is of job {found.manifest['job']}, RESULT of job {uid}"])
        model = AutoModelForCausalLM.from_pretrained(result)
        fill(model, found)
    except (Damaged, ValueError, KeyError, OSError) as fault:
        raise invalid([f"CHECKPOINT: {checkpoint} doesn't go with {result}: {fault}"]) from fault
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is one rename.
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        weights = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json")
        shutil.copytree(result, draft, ignore=weights, dirs_exist_ok=True)
        model.save_pretrained(draft)
        provenance = {**told, "checkpoint": uri, "sha256": digest}
        (draft / PROVENANCE).write_text(json.dumps(provenance, indent=1, sort_keys=True))
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return int(found.manifest["step"])
