"""The program of docs/fine_tune.md, with a small model in the place of the one that it downloads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertTokenizer, DistilBertConfig

WORDS = ["good", "bad", "film", "book", "plot", "fine", "dull", "bright", "long", "short"]


def saved_model(folder: Path) -> str:
    folder.mkdir()
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizer(str(vocabulary)).save_pretrained(folder)
    config = DistilBertConfig(vocab_size=20, dim=16, hidden_dim=32, n_layers=2, n_heads=2, max_position_embeddings=130)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return str(folder)


def test_the_program_of_the_page(real_mesh: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "fine_tune.md").read_text()
    (program,) = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    lines = []
    for number in range(60):
        word = "good" if number % 2 else "bad"
        lines.append(f"{WORDS[2 + number % 8]} {word} {WORDS[2 + number % 5]}\t{number % 2}")
    Path("reviews.tsv").write_text("\n".join(lines) + "\n")
    for before, after in (
        ('"distilbert-base-uncased", 3, 32', f"{saved_model(tmp_path / 'model')!r}, 12, 16"),
        ('mesh = Mesh({"data": -1})', ""),
        ("max_lr=5e-4", "max_lr=0.05"),
    ):
        assert before in program, before
        program = program.replace(before, after)
    exec(compile(program, "fine_tune.md", "exec"), {"mesh": real_mesh(2), "__name__": "page"})
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 12 and said[-1].startswith("epoch 12")
    assert float(said[-1].split()[-1]) == pytest.approx(1.0)
    tuned = AutoModelForSequenceClassification.from_pretrained("fine-tuned").state_dict()
    begun = AutoModelForSequenceClassification.from_pretrained("model").state_dict()
    changed = {name for name in begun if not torch.equal(begun[name], tuned[name])}
    assert changed and all("layer.1." in name or "classifier" in name for name in changed)
