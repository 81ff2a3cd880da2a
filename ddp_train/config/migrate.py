"""Configs that earlier versions froze, in run directories and in the manifests of checkpoints."""

from __future__ import annotations

from typing import Any

from ddp_train.config.bind import bind
from ddp_train.options.key import range_of
from ddp_train.options.schema import Config


def migrated(values: dict[str, Any]) -> dict[str, Any]:
    """A frozen config as plain values, with the keys of this version. What is not recognised stays,
    for `bind`.

    Up to November 2026: `train.loss` and `train.label_smoothing` (now those of `task`),
    `train.reduction` and `train.virtual_shards` (now strategy=ordered), `data.loader` (now
    `data.placement`), `data.decode=threads` (the same pixels as processes), `probe` (now `hooks`),
    no `reasons`; no `tuning.triton_kernels`: a run goes on without; `tuning.one_graph` or nothing
    (now `tuning.buckets`).
    """
    values = {
        name: dict(content) if isinstance(content, dict) else content
        for name, content in values.items()
    }
    values.pop("probe", None)
    train = values.get("train")
    data = values.get("data")
    tuning = values.get("tuning")
    if isinstance(tuning, dict):
        tuning.setdefault("triton_kernels", False)
        one_graph = tuning.pop("one_graph", False)
        strategy = values.get("strategy")
        reasons = values.get("reasons")
        own_size = isinstance(strategy, dict) and (
            strategy.get("bucket_cap_mb") or strategy.get("bucket_cap_mb_list")
        )
        uncut = one_graph and tuning.get("compile") and not own_size
        tuning.setdefault("buckets", "one" if uncut else "default")
        if isinstance(reasons, dict) and "one_graph" in reasons:
            reasons["buckets"] = reasons.pop("one_graph")
    if isinstance(train, dict):
        reduction = train.pop("reduction", None)
        shards = train.pop("virtual_shards", None)
        loss = train.pop("loss", "auto")
        smoothing = train.pop("label_smoothing", 0.0)
        if loss == "cross_entropy" or smoothing:
            values["task"] = {"name": "classification", "label_smoothing": smoothing}
        elif loss == "mse":
            values["task"] = {"name": "regression"}
        if reduction == "ordered":
            values["strategy"] = {"name": "ordered"} | (
                {} if shards is None else {"virtual_shards": shards}
            )
    if isinstance(data, dict) and data.get("name") != "custom":
        if "loader" in data:
            data["placement"] = data.pop("loader")
        if data.get("decode") == "threads":
            data["decode"] = "processes"
    return values


def bind_frozen(values: dict[str, Any]) -> tuple[Config, list[str]]:
    """Binds a frozen config of this version or an earlier one. Returns it and all problems."""
    values = migrated(values)
    reasons = values.pop("reasons", {})
    process_range = values.pop("process_range", None)
    counts = values.pop("process_counts", [])
    hosts = values.pop("host_range", None)
    config, problems = bind(values)
    if hosts is None or range_of(hosts):
        config.host_range = hosts
    else:
        problems.append("host_range: must be a range, as 2:3")
    if (
        range_of(process_range)
        and isinstance(counts, list)
        and all(type(count) is int for count in counts)
    ):
        config.process_range = process_range
        config.process_counts = counts
    elif process_range or counts:
        problems.append(
            "process_range, process_counts: must be a range, as 2:8, and the numbers in it"
        )
    if isinstance(reasons, dict):
        config.reasons = {str(name): str(reason) for name, reason in reasons.items()}
    else:
        problems.append("reasons: must be a mapping from switches to texts")
    return config, problems
