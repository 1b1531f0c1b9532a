"""Documents that share a sequence: what the model sees of each is what it would see of it alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from trainer.jobs import TINY_MODEL
from trainer.test_data import corpus_of, tokens_of, training
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from crosscloud_trainer import contract
from crosscloud_trainer.contract import Data, Model, Packing, Training
from crosscloud_trainer.data.split import Share, Split
from crosscloud_trainer.data.tokenizer import load_tokenizer
from crosscloud_trainer.data.tokens import Vocabulary
from crosscloud_trainer.failures import Failure
from crosscloud_trainer.models.apart import check_apart
from crosscloud_trainer.models.presets import build_model
from crosscloud_trainer.result import write_result
from crosscloud_trainer.storage import Storage
from crosscloud_trainer.tasks.causal import CausalTask, positions

CPU = torch.device("cpu")
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
NEOX = {"model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
NEOX |= {"num_attention_heads": 2, "max_position_embeddings": 64}
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2}
LENGTH = 24


def sharp(config: dict[str, Any]) -> PreTrainedModel:
    """A model whose logits differ by more than rounding."""
    model = build_model(Model(config=config), LENGTH, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(8)
    return model.eval()


def loss_of(model: PreTrainedModel, ids: Sequence[int]) -> tuple[float, int]:
    """(sum of the losses of all tokens but the first, their number) of one text, by torch."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    total = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")
    return float(total), len(ids) - 1


def corpus_in(tmp_path: Path, texts: Sequence[str]) -> tuple[Training, Any]:
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_text(text)
    spec = replace(training(""), sequence_length=LENGTH, batch_size=2)
    files = replace(spec.data, train=(f"{tmp_path}/*.txt",), validation=(f"{tmp_path}/0[0-3].txt",))
    spec = replace(spec, data=files)
    return spec, corpus_of(spec, tmp_path / "out")


TEXTS = ["some text", "more of it", "ab", "the rest of all that"] + [
    f"document {number} of many" for number in range(20)
]


@pytest.mark.parametrize("config", [TINY_MODEL, GPT2, NEOX], ids=lambda config: config["model_type"])
def test_the_loss_of_packed_documents_is_that_of_the_documents_alone(tmp_path: Path, config: dict[str, Any]) -> None:
    spec, corpus = corpus_in(tmp_path, TEXTS)
    model = sharp(config)
    split = corpus.split(spec, [["m"]], 0)
    for step in range(4):
        rows = split.of_replica(step)
        ids, starts = corpus.take(rows)
        parts = []
        for row, begins in zip(ids.tolist(), starts.tolist(), strict=True):
            cuts = [0, *(place for place in range(1, LENGTH) if begins[place]), LENGTH]
            parts += [loss_of(model, row[low:high]) for low, high in itertools.pairwise(cuts) if high - low > 1]
        alone = sum(total for total, _ in parts) / sum(count for _, count in parts)
        for ranks in (1, 2):
            packed = []
            for rank in range(ranks):
                task = CausalTask(corpus, split, Packing.DOCUMENTS, rank, ranks, 1)
                for batch in task.micro_batches(step, CPU):
                    with torch.no_grad():
                        packed.append(float(model(**batch.inputs).loss) * batch.weight)
            assert np.mean(packed) == pytest.approx(alone, rel=1e-5)


def test_a_stream_is_one_text_per_sequence(tmp_path: Path) -> None:
    spec, corpus = corpus_in(tmp_path, TEXTS)
    model = sharp(TINY_MODEL)
    split = corpus.split(spec, [["m"]], 0)
    (batch,) = CausalTask(corpus, split, Packing.STREAM, 0, 1, 2).micro_batches(0, CPU)
    assert batch.weight == 1
    totals = [loss_of(model, row)[0] for row in corpus.take(split.of_replica(0))[0].tolist()]
    with torch.no_grad():
        assert float(model(**batch.inputs).loss) == pytest.approx(sum(totals) / 2 / (LENGTH - 1), rel=1e-5)


@pytest.mark.parametrize("packing", list(Packing))
def test_evaluation_is_the_same_mean_over_tokens_on_any_number_of_ranks(tmp_path: Path, packing: Packing) -> None:
    spec, corpus = corpus_in(tmp_path, TEXTS)
    model, split = sharp(TINY_MODEL), corpus.split(spec, [["m"]], 0)
    assert len(corpus.validation) == 2

    def losses_of(batches: Sequence[Mapping[str, torch.Tensor]]) -> list[float]:
        with torch.no_grad():
            return [float(model(**batch).loss) for batch in batches]

    found = []
    for ranks in (1, 2, 3):
        parts = [CausalTask(corpus, split, packing, rank, ranks, 1).evaluate(losses_of, CPU) for rank in range(ranks)]
        found.append((sum(count for _, count in parts), sum(total for total, _ in parts)))
    starts = np.stack([corpus.validation.starts(number) for number in range(2)])
    expected = 2 * (LENGTH - 1) - (int(starts[:, 1:].sum()) if packing is Packing.DOCUMENTS else 0)
    assert [count for count, _ in found] == [expected] * 3
    assert [total for _, total in found] == pytest.approx([found[0][1]] * 3, rel=1e-6)


def test_positions_begin_anew_with_each_document() -> None:
    starts = np.array([[0, 0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 1]], dtype=bool)
    assert positions(starts).tolist() == [[0, 1, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 0]]


@pytest.mark.parametrize("config", [TINY_MODEL, GPT2, NEOX], ids=lambda config: config["model_type"])
def test_models_that_keep_documents_apart_are_taken(config: dict[str, Any]) -> None:
    check_apart(build_model(Model(config=config), LENGTH, 0))


@pytest.mark.parametrize(
    "config",
    [BLOOM, {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}],
    ids=lambda config: config["model_type"],
)
def test_models_that_mix_documents_are_refused_with_the_way_out(config: dict[str, Any]) -> None:
    model = build_model(Model(config=config), LENGTH, 0)
    with pytest.raises(Failure, match=rf"^training.data.packing: .* type {config['model_type']} mix .*; set Stream"):
        check_apart(model)


def trained_tokenizer(folder: Path, **marks: str) -> str:
    """A small byte-pair tokenizer of `tokenizers` as a `transformers` folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(marks.values()), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("marks", "before", "after"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, ["<s>"], ["</s>"]),
        ({"bos_token": "<end>", "eos_token": "<end>"}, [], ["<end>"]),
        ({}, [], []),
    ],
)
@pytest.mark.parametrize("bare", [False, True])
def test_a_tokenizer_from_a_folder_or_file_gives_its_own_ids_between_its_marks(
    tmp_path: Path, marks: dict[str, str], before: list[str], after: list[str], bare: bool
) -> None:
    address = trained_tokenizer(tmp_path / "tokenizer", **marks)
    known = AutoTokenizer.from_pretrained(address)
    if bare:  # such a file knows no marks
        address, before, after = f"{address}/tokenizer.json", [], []
    text = "document 5 of many and some text\nzweites Stück"
    (tmp_path / "a.txt").write_text(text)
    data = Data(train=(f"{tmp_path}/a.txt",), tokenizer=contract.Tokenizer.FILE, tokenizer_file=address)
    ids = [*known.convert_tokens_to_ids(before), *known(text, add_special_tokens=False)["input_ids"]]
    ids += known.convert_tokens_to_ids(after)
    corpus = corpus_of(replace(training(""), data=data, sequence_length=len(ids)), tmp_path / "out")
    assert tokens_of(corpus.train[0]) == [ids]
    assert corpus.vocabulary.size == len(known)
    assert load_tokenizer(corpus.tokenizer_folder)(text)["input_ids"] == known(text)["input_ids"]


def test_ids_above_65535_are_kept(tmp_path: Path) -> None:
    vocabulary = {f"w{number}": number for number in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(" ".join(f"w{number}" for number in range(69_990, 70_000)))
    data = Data(
        train=(f"{tmp_path}/a.txt",),
        tokenizer=contract.Tokenizer.FILE,
        tokenizer_file=str(tmp_path / "tokenizer.json"),
    )
    corpus = corpus_of(replace(training(""), data=data, sequence_length=10), tmp_path / "out")
    assert tokens_of(corpus.train[0]) == [list(range(69_990, 70_000))]


def test_documents_of_one_token_leave_nothing_behind(tmp_path: Path) -> None:
    address = trained_tokenizer(tmp_path / "tokenizer")
    one = AutoTokenizer.from_pretrained(address).convert_ids_to_tokens(7)
    for number, text in enumerate([one, "document 5 of many", one, "", "some text", one]):
        (tmp_path / f"{number}.txt").write_text(text)
    data = Data(
        train=(f"{tmp_path}/*.txt",),
        validation=(f"{tmp_path}/4.txt",),
        tokenizer=contract.Tokenizer.FILE,
        tokenizer_file=address,
    )
    known = AutoTokenizer.from_pretrained(address)
    ids = known("document 5 of many")["input_ids"]
    held = known("some text")["input_ids"]
    length = min(len(ids), len(held))
    corpus = corpus_of(replace(training(""), data=data, sequence_length=length), tmp_path / "out")
    assert tokens_of(corpus.train[0]) == [ids[:length]]
    assert corpus.train[0].starts(0).nonzero()[0].tolist() == [0]


def test_the_model_gets_the_tokenizers_size_and_marks_and_a_smaller_one_is_refused() -> None:
    vocabulary = Vocabulary(300, 1, 2, None)
    config = {**TINY_MODEL}
    model = build_model(Model(config=config), LENGTH, 0, vocabulary)
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == 300
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, None)
    with pytest.raises(
        Failure, match=r"config.vocab_size: found 299; must be at least 300 for the ids of tokenizerFile"
    ):
        build_model(Model(config={**config, "vocab_size": 299}), LENGTH, 0, vocabulary)


def test_the_result_carries_the_tokenizer(tmp_path: Path) -> None:
    address = trained_tokenizer(tmp_path / "tokenizer", bos_token="<s>", eos_token="</s>")
    known = AutoTokenizer.from_pretrained(address)
    model = build_model(Model(config=TINY_MODEL), LENGTH, 0, Vocabulary(len(known), 0, 1, None))
    result = write_result(Storage(str(tmp_path / "storage")), model, {}, Path(address))
    loaded = AutoTokenizer.from_pretrained(result)
    assert loaded("document 5 of many")["input_ids"] == known("document 5 of many")["input_ids"]
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")


def test_a_split_of_two_sources_reads_from_both(tmp_path: Path) -> None:
    split = Split((Share(0, 3, 0, 1), Share(1, 5, 0, 1)), 0, 8, 0)
    assert sorted(map(tuple, split.of_replica(0).tolist())) == [(0, n) for n in range(3)] + [(1, n) for n in range(5)]
