"""Arguments of a model call are divided into rows only as the table of verified classes says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from diffusers.models.controlnets.controlnet import ControlNetOutput
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from anyaccel.runtime.placement.row_arguments import (
    NotSplittableError,
    RowRules,
    count_rows,
    join_outputs,
    load_table,
    split_arguments,
)
from tools.row_table import classify, merge

KINDS: dict[str, tuple[str, ...]] = {
    "sample": ("rows",),
    "timestep": ("scalar", "rows"),
    "text": ("one", "rows"),
    "frames": ("repeated",),
    "layers": ("columns",),
    "ids": ("shared2",),
    "residuals": ("items",),
    "residuals[]": ("rows",),
    "shapes": ("list",),
    "extra.embeds": ("rows",),
}
RULES = RowRules(KINDS, joins_lists=False)


class Model(torch.nn.Module):
    """A model with arguments of every kind."""

    def forward(self, sample: Any, timestep: Any = None, **kwargs: Any) -> Any:
        """Return the arguments."""
        return sample, timestep, kwargs


def split(*args: Any, limit: int = 1, **kwargs: Any) -> list[Any]:
    return split_arguments(Model(), RULES, args, kwargs, limit)


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.arange(count).view(-1, *[1] * len(shape)).expand(count, *shape)


def test_every_kind_of_argument() -> None:
    parts = split(
        rows(3, 2), torch.tensor(7), text=torch.ones(1, 4), frames=rows(6, 1), layers=rows(3, 2).T,
        ids=torch.ones(3, 2), residuals=[rows(3, 1), rows(3, 5)], shapes=[(1, 2), (3, 4), (5, 6)],
        extra={"embeds": rows(3, 1), "scale": 0.5}, return_dict=False, limit=2,
    )  # fmt: skip
    assert len(parts) == 2
    assert parts[0][0][0].tolist() == [[0, 0], [1, 1]]
    (sample, timestep), keywords = parts[1]
    assert sample.tolist() == [[2, 2]]
    assert timestep.tolist() == 7
    assert keywords["text"].shape == (1, 4)
    assert keywords["frames"].tolist() == [[4], [5]]
    assert keywords["layers"].tolist() == [[2], [2]]
    assert keywords["ids"].shape == (3, 2), "three rows by chance"
    assert [tensor.shape for tensor in keywords["residuals"]] == [(1, 1), (1, 5)]
    assert keywords["shapes"] == [(5, 6)]
    assert keywords["extra"]["embeds"].tolist() == [[2]]
    assert keywords["extra"]["scale"] == 0.5
    assert keywords["return_dict"] is False


def test_a_tensor_that_is_passed_twice_stays_one_object() -> None:
    tensor = rows(2, 3)
    for _, keywords in split(rows(2, 1), text=tensor, extra={"embeds": tensor}, frames=tensor):
        assert keywords["text"].data_ptr() == keywords["extra"]["embeds"].data_ptr()
    twice = split_arguments(
        Model(), RowRules({"sample": ("rows",), "timestep": ("rows",)}, False), (tensor, tensor), {}, 1
    )
    assert all(args[0] is args[1] for args, _ in twice)


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"unknown": torch.ones(2)}, "'unknown' is not known"),
        ({"extra": {"other": torch.ones(2)}}, "'extra.other' is not known"),
        ({"text": torch.ones(4, 4)}, "'text' has the unexpected shape"),
        ({"frames": torch.ones(5, 4)}, "'frames' has the unexpected shape"),
        ({"ids": torch.ones(2, 3, 4)}, "'ids' has the unexpected shape"),
        ({"ids": torch.tensor(1)}, "'ids' has the unexpected shape"),
        ({"timestep": torch.ones(3)}, "'timestep' has the unexpected shape"),
        ({"shapes": [(1, 2)]}, "'shapes' is a list of 1 items"),
        ({"numbers": [1, 2]}, "'numbers' is a list of 2 items"),
        ({"extra": {"mask": object()}}, "'extra.mask' is a object"),
    ],
)
def test_what_the_table_does_not_say_is_not_split(keywords: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotSplittableError, match=reason):
        split(rows(2, 3), **keywords)


def test_the_number_of_rows() -> None:
    assert count_rows(Model(), RULES, (torch.ones(5, 2),), {}) == 5
    assert count_rows(Model(), RULES, (), {"sample": torch.ones(4, 2)}) == 4
    assert count_rows(Model(), RowRules({"sample": ("list",)}, True), ([1, 2, 3],), {}) == 3
    with pytest.raises(NotSplittableError, match="'sample' has no rows"):
        count_rows(Model(), RULES, (torch.tensor(1.0),), {})


def test_outputs_of_every_kind_are_joined() -> None:
    first, second = torch.zeros(1, 2), torch.ones(2, 2)
    assert join_outputs([(first,), (second,)], joins_lists=False)[0].tolist() == [[0, 0], [1, 1], [1, 1]]
    joined = join_outputs([Transformer2DModelOutput(first), Transformer2DModelOutput(second)], joins_lists=False)
    assert type(joined) is Transformer2DModelOutput
    assert joined.sample.shape == joined["sample"].shape == (3, 2)
    residuals = [ControlNetOutput([part, part], part) for part in (first, second)]  # type: ignore[arg-type]
    assert [len(part) for part in join_outputs(residuals, joins_lists=False).down_block_res_samples] == [3, 3]
    assert len(join_outputs([([first],), ([second, second],)], joins_lists=True)[0]) == 3
    with pytest.raises(NotSplittableError, match="the output contains a float"):
        join_outputs([1.0, 2.0], joins_lists=False)


def test_the_table_of_the_package() -> None:
    table = load_table()
    rules = table.models["UNet2DConditionModel"]
    assert next(iter(rules.arguments)) == "sample"
    assert rules.arguments["encoder_hidden_states"] == ("rows",)
    assert table.models["FluxTransformer2DModel"].arguments["img_ids"] == ("shared2",)
    assert "AutoencoderKL" in table.vaes
    assert not any("PAG" in name for name in table.processors)
    assert table.find_rules(Model()) is None


def test_how_the_table_is_generated() -> None:
    shapes: dict[str, dict[str, list[Any]]] = {
        "sample": {"a": [[2, [2, 4]], [3, [3, 4]]]},
        "timestep": {"a": [[2, []], [3, []]], "b": [[2, [2]], [4, [4]]]},
        "ids": {"a": [[2, [2, 3]], [3, [2, 3]]]},
        "frames": {"a": [[2, [8, 1]], [3, [12, 1]]]},
        "layers": {"a": [[2, [5, 2, 1]], [3, [5, 3, 1]]]},
        "shapes": {"a": [[2, 2], [3, 3]]},
        "seen_once": {"a": [[2, [2, 3]]]},
        "both": {"a": [[2, [2]], [3, [3]]], "b": [[2, [2]], [3, [2]]]},
    }
    kinds = classify(shapes)
    assert kinds == {
        "sample": ["rows"], "timestep": ["rows", "scalar"], "ids": ["shared2"], "frames": ["repeated"],
        "layers": ["columns"], "shapes": ["list"],
    }  # fmt: skip

    def compare(kind: str, difference: str, *processors: str) -> dict[str, Any]:
        return {
            "class": kind, "difference": difference, "processors": list(processors), "limit": 1,
            "group": f"{kind}{difference} prompts",
            "arguments": ["sample", *(["ids"] if difference == "padded" else [])],
        }  # fmt: skip

    part = {
        "shapes": {"Good": shapes, "Bad": shapes, "Guided": shapes},
        "joins_lists": {"Good": True},
        "comparisons": [
            compare("Good", "", "Attn"), compare("Bad", "differs", "Attn"), compare("Guided", "", "Attn"),
            compare("Guided", "differs", "Attn", "PAG"), compare("Guided", "padded", "Attn"),
        ],
        "vaes": [{"class": "VAE", "method": "decode", "difference": "", "processors": []}],
    }  # fmt: skip
    table = merge([json.loads(json.dumps(part))])
    assert list(table["models"]) == ["Good", "Guided"]
    assert table["models"]["Good"]["joins_lists"]
    assert "ids" not in table["models"]["Guided"]["arguments"], "it occurs only in calls that differ"
    assert "Attn" in table["processors"]
    assert "PAG" not in table["processors"]
    assert table["vaes"] == ["VAE"]
