"""Whether the files of a data set are there and whole. Nothing is written."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import Counter
from pathlib import Path

from ddp_train.data.corpus.config import TextConfig, TokensConfig
from ddp_train.options.custom import NOT_TELLING, CustomDataConfig
from ddp_train.options.schema import Config
from ddp_train.text import did_you_mean, shown

SPLITS = ("train", "validation", "test")


def missing_data(config: Config) -> list[str]:
    """What this host lacks of the data set, or cannot do with it."""
    data = config.data
    weights = None if config.uses_trained else data.weights  # nothing trains
    if weights not in (None, "balanced") and not Path(weights).is_file():
        guess = did_you_mean(weights, ["balanced"])
        return [
            f"data.weights={weights}: no such file; use balanced, or the path of a .npy or text"
            f" file{guess}"
        ]
    paths = [Path(data.root, name) for name in data.files]
    missing = [path for path in paths if not path.is_file()]
    if missing and not data.download:
        packed = missing[0].with_name(missing[0].name + ".gz")
        if packed.is_file():
            remedy = f"unpack it: gunzip -k {packed.parent}/*.gz"
        else:
            remedy = "add data.download=true"
        return [
            f"data.root={data.root}: {missing[0]} is missing; {remedy}, or name the folder that"
            f" holds {data.name}"
        ]
    cut = [path for path in paths if path.name.endswith("-ubyte") and _is_cut(path)]
    if cut:
        return [
            f"data.root={data.root}: {cut[0]} is truncated; remove it, and fetch it with"
            " data.download=true"
        ]
    if isinstance(data, TextConfig | TokensConfig) and (problem := _missing_text(data)):
        return [problem]
    if data.decode == "gpu" and config.device == "cpu":
        return ["data.decode=gpu: needs a GPU; use data.decode=processes"]
    for name in data.class_folders:
        folder = Path(data.root, name)
        if not folder.is_dir() or not any(entry.is_dir() for entry in folder.iterdir()):
            return [
                f"data.root={data.root}: {folder} must hold a folder per class; name the folder"
                f" that holds {name}/"
            ]
    return []


def wrong_own_data(data: CustomDataConfig) -> list[str]:
    """What is wrong with the keys for a data set of your own, before its code is loaded."""
    problems = []
    for name, part in data.splits.items():
        if name not in SPLITS:
            guess = did_you_mean(name, list(SPLITS))
            problems.append(
                f"data.splits.{name}={shown(part)}: the splits are {', '.join(SPLITS)}{guess}"
            )
        elif not isinstance(part, dict):
            problems.append(
                f"data.splits.{name}={shown(part)}: must be arguments; use"
                f" data.splits.{name}.NAME=VALUE"
            )
    telling = {
        name: {
            key: value for key, value in data.splits.get(name, {}).items() if key not in NOT_TELLING
        }
        for name in ("train", "test", *data.splits)
        if not problems
    }
    same = [
        name for name, given in telling.items() if name != "train" and given == telling["train"]
    ]
    if data.splits and same:
        problems.append(
            f"data.splits={shown(data.splits)}: training and {same[0]} set would be the same"
            f" samples; use data.splits.train.NAME=VALUE data.splits.{same[0]}.NAME=VALUE with"
            " different values"
        )
    if "validation" in data.splits and data.validation is not None:
        part = f"{data.validation:g}"
        if data.validation:
            instead = "leave one of them out"
        else:
            instead = "leave out data.splits.validation"
        problems.append(
            f"data.validation={part}: contradicts data.splits.validation, which validates;"
            f" {instead}"
        )
    for name in ("transform", "test_transform"):
        for place, item in enumerate(getattr(data, name) or ()):
            if not isinstance(item, str) and not (
                isinstance(item, dict) and isinstance(item.get("_target_"), str)
            ):
                use = f"data.{name}=[{{_target_:torchvision.transforms.v2.RandomCrop,size:28}}]"
                problems.append(
                    f"data.{name}[{place}]={shown(item)}: must be a class with its arguments; use"
                    f" {use}"
                )
    return problems


def _missing_text(data: TextConfig | TokensConfig) -> str:
    """What this host lacks of a corpus; "" if nothing."""
    if data.tokenizer and not Path(data.tokenizer).is_file():
        return (
            f"data.tokenizer={data.tokenizer}: no such file; name a tokenizer.json, or leave it out"
        )
    if data.tokenizer and importlib.util.find_spec("tokenizers") is None:
        return (
            f"data.tokenizer={data.tokenizer}: needs the package tokenizers; {sys.executable} -m"
            " pip install tokenizers"
        )
    glob = getattr(data, "glob", None)
    if data.path is None and isinstance(data, TokensConfig):
        return (
            "data.path=null: data=tokens needs a .bin file, or a folder with some; add"
            " data.path=PATH"
        )
    if glob and (data.path is None or Path(data.path).is_file()):
        return (
            f"data.glob={glob}: chooses among the files of a folder; add data.path=FOLDER, or leave"
            " it out"
        )
    if data.path is None or Path(data.path).is_file():
        return ""
    if not Path(data.path).is_dir():
        return f"data.path={data.path}: no such file or folder"
    if any(Path(data.path).rglob(glob or data.pattern)):
        return ""
    there = Counter(
        path.suffix for path in Path(data.path).rglob("*.*") if path.is_file()
    ).most_common(3)
    if there:
        seen = f"; there are {', '.join(f'{count} {suffix}' for suffix, count in there)}"
    else:
        seen = ""
    if isinstance(data, TokensConfig):
        return f"data.path={data.path}: no {data.pattern} in this folder{seen}"
    use = f"; use data.glob=*{there[0][0]}" if there else ""
    return f"data.path={data.path}: no file matches data.glob={glob or data.pattern}{seen}{use}"


def _is_cut(path: Path) -> bool:
    """Whether an IDX file is shorter than its header says: two zeros, type, dimensions, sizes as
    uint32, bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        header = file.read(4)
        sizes = file.read(4 * header[3]) if len(header) == 4 else b""
    if len(header) < 4 or len(sizes) < 4 * header[3]:
        return True
    numbers = [int.from_bytes(sizes[at : at + 4]) for at in range(0, len(sizes), 4)]
    return path.stat().st_size < 4 + len(sizes) + math.prod(numbers)
