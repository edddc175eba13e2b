"""The recipe: every key, its limits and its default; recipe.yaml says what it means. Imports no torch."""

import difflib
import os
import re
import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal
import yaml
from pydantic import BaseModel, Field, JsonValue, ValidationError, ValidationInfo, field_validator, model_validator
from fullshard.errors import ConfigError, read_table, refusal
from fullshard.words import answer_word

TEXTS = read_table("recipe.yaml")


def parse_quantity(text: str) -> tuple[int, str]:
    """``"64 rows"`` -> (64, "rows"); ``"65536 tokens"`` -> (65536, "tokens"). ValueError where the unit is missing."""
    match = re.match(r"\s*([0-9][0-9_,]*)\s+(rows|tokens)\s*$", text) if isinstance(text, str) else None
    if not match or int(re.sub("[_,]", "", match.group(1))) < 1:
        raise ValueError(f'needs a count of at least 1 and its unit, "64 rows" or "65536 tokens"; it is {text!r}')
    return int(re.sub("[_,]", "", match.group(1))), match.group(2)


class Section(BaseModel):
    """A part of the recipe: frozen, and an unknown key is an error."""

    model_config = {"frozen": True, "extra": "forbid", "allow_inf_nan": False}

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        for name, field in cls.model_fields.items():
            field.description = TEXTS[cls.__name__][name]
        cls.model_rebuild(force=True)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: object, info: ValidationInfo) -> object:
        """A truth value is no number, and NUL is in no path; both would be taken for something else without a word."""
        if isinstance(value, bool) and "bool" not in str(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError(f"needs a value of its own, not {str(value).lower()}")
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"holds a NUL character; it is {value!r}")
        return value


class ModelSection(Section):
    """The base model."""

    path: str = Field(min_length=1)
    source: Literal["huggingface", "modelscope"] = "huggingface"
    revision: str | None = Field(None, min_length=1)
    add_tokens: list[str] = Field(default_factory=list)

    @field_validator("add_tokens")
    @classmethod
    def _distinct(cls, tokens: list[str]) -> list[str]:
        if any(not token.strip() for token in tokens) or len(set(tokens)) < len(tokens):
            raise ValueError(f"needs tokens that are not empty and differ; it is {tokens}")
        return tokens


class DataFile(Section):
    """One source of training rows and its weight in the mix."""

    path: str = Field(min_length=1)
    weight: float = Field(1.0, gt=0, le=1000)


class DataSection(Section):
    """The data, and how a row becomes tokens."""

    train: str | list[str | DataFile]
    eval: str | float | None = None
    source: Literal["huggingface", "modelscope"] = "huggingface"
    shape: Literal["auto", "messages", "sharegpt", "alpaca", "prompt", "text"] = "auto"
    on_bad: Literal["stop", "drop"] = "stop"
    max_length: int = Field(1024, ge=4, le=2**24)
    packing: bool | Literal["auto"] = False
    columns: dict[str, str] | None = None
    system: str | None = None
    template_arguments: dict[str, JsonValue] | None = None
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    too_long: Literal["stop", "drop", "cut"] = "stop"


class LoraSection(Section):
    """LoRA settings, used when method is lora."""

    rank: int = Field(16, ge=1, le=2**16)
    alpha: float = Field(32.0, gt=0)
    targets: str | list[str] = "all-linear"
    variant: Literal["lora", "rslora", "dora"] = "lora"


class TrainSection(Section):
    """The training loop."""

    epochs: float = Field(1.0, gt=0, le=10_000)
    max_steps: int | None = Field(None, ge=1)
    learning_rate: float | None = Field(None, gt=0)
    global_batch: str = "32 rows"
    drop_last: bool = False
    micro_batch: str | None = None
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "bf16_pure"] = "auto"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = Field(0.05, ge=0)
    clip_norm: float = Field(1.0, ge=0)
    recompute: Literal["auto", "none", "blocks"] | Annotated[int, Field(ge=1)] = "auto"
    sharding: Literal["full", "keep", "replicate"] = "full"
    replicas: int = Field(1, ge=1)
    eval_every: int | None = Field(None, ge=1)
    save_every: int | None = Field(None, ge=1)
    keep_last: int = Field(2, ge=1)
    keep_best: bool = False
    trackers: list[Literal["tensorboard", "wandb", "swanlab"]] = Field(default_factory=list)
    router_loss: bool = False
    seed: int = Field(0, ge=0, le=2**62)

    @field_validator("global_batch", "micro_batch", mode="before")
    @classmethod
    def _with_unit(cls, value: Any) -> object:
        if value is not None:
            parse_quantity(value)
        return value


class RunConfig(Section):
    """A whole recipe. Frozen: nothing writes to it after ``load_config``."""

    model: ModelSection
    data: DataSection
    method: Literal["full", "lora"] = "lora"
    lora: LoraSection = Field(default_factory=LoraSection)
    train: TrainSection = Field(default_factory=TrainSection)
    engine: Literal["auto", "torch", "simple"] = "auto"
    output: str = Field(min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> "RunConfig":
        output, model = os.path.realpath(self.output), os.path.realpath(os.path.expanduser(self.model.path))
        wrong = {
            "share": isinstance(self.data.eval, float) and not 0 < self.data.eval < 1,
            "train": not self.data.train or not all(self.data.train),
            "targets": not self.lora.targets or not all(self.lora.targets),
            "sharding": self.train.sharding == "replicate" and self.engine == "torch",
            "columns": self.data.columns == {},
            "output": os.path.commonpath([output, model]) == model,
            "lora": self.method == "full" and "lora" in self.model_fields_set,
        }
        for name in (name for name, holds in wrong.items() if holds):
            raise ValueError(TEXTS["wrong"][name].format(recipe=self))
        return self

    # peak: the recipe's, else 1e-4 for LoRA and 1e-5 for full fine-tuning
    learning_rate = property(lambda self: self.train.learning_rate or (1e-4 if self.method == "lora" else 1e-5))

    @property
    def train_files(self) -> list[DataFile]:
        """Sources of the training rows, each with its weight."""
        files = [self.data.train] if isinstance(self.data.train, str) else self.data.train
        return [DataFile(path=file) if isinstance(file, str) else file for file in files]


def recipe_keys() -> list[str]:
    """Every leaf key of the recipe in dotted form, in order."""
    inside = {name: getattr(field.annotation, "model_fields", ()) for name, field in RunConfig.model_fields.items()}
    return [key for name, inner in inside.items() for key in [f"{name}.{leaf}" for leaf in inner] or [name]]


class _RecipeLoader(yaml.SafeLoader):
    """YAML in which a key occurs once, 1e-4 is a number, and no alias repeats a part (bombs are made of them)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            problem = "aliases (*name) are not read; write it out"
            raise yaml.MarkedYAMLError(None, None, problem, self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in names[:place]:
                raise yaml.MarkedYAMLError(None, None, f"the key {key.value} stands here twice", key.start_mark)
        return super().construct_mapping(node, deep)


NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
_RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))
NO_DATA = "no data"  # data.train of a model that is planned alone
YAML_ERRORS = (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError)  # the last three: !!int abc


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = (), or_model: bool = False) -> RunConfig:
    """A recipe (``or_model``: or defaults for a model) with ``a.b=value`` changes. Paths: the caller's. ConfigError."""
    is_file = (path := Path(path)).is_file()
    if not is_file and not (or_model and path.suffix not in (".yaml", ".yml")):
        raise ConfigError(f"No recipe at {path}.", "Make one: fullshard init MODEL DATA")
    try:
        alone = {"model": {"path": str(path)}, "data": {"train": NO_DATA}, "output": "run"}
        values = yaml.load(path.read_text(encoding="utf-8"), _RecipeLoader) if is_file else alone
    except YAML_ERRORS as error:
        raise ConfigError(f"{path} is not readable YAML: {error}", "See examples/ for complete recipes.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no keys.", "See examples/ for complete recipes.")
    for override in overrides:
        _apply_override(values, override)
    return config_from_dict(values, str(path))


def config_from_dict(values: dict[str, Any], origin: str = "recipe") -> RunConfig:
    """Check a nested dict and return the frozen config, or raise ConfigError listing every problem."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = [_explain(problem) for problem in error.errors()]
        lines, count = "\n  - ".join(dict.fromkeys(problems)), f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        raise refusal("wrong_recipe", origin=origin, count=count, lines=lines) from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not all(parts := key.split(".")):
        raise ConfigError(f"{override!r} is not an override.", "Write key=value, for example train.epochs=3")
    try:
        value = yaml.load(text, _RecipeLoader)
    except YAML_ERRORS:
        raise ConfigError(f"The value in {override!r} is not readable YAML.", "Quote it: 'key=\"value\"'") from None
    place = values
    for part in parts[:-1]:
        place[part] = {} if place.get(part) is None else place[part]
        if not isinstance(place := place[part], dict):
            raise refusal("no_section", override=override, part=part, found=reprlib.repr(place))
    place[parts[-1]] = value


def _explain(problem: dict[str, Any]) -> str:
    place = [str(part) for part in problem["loc"] if not re.match(r"(str|float|DataFile)$|list\[", str(part))]
    key, kind = ".".join(place) or "recipe", problem["type"]
    foreign = kind == "extra_forbidden" or (key, kind) == ("model", "model_type")
    if foreign and (answer := answer_word(key, problem["input"])):
        return answer
    if kind == "extra_forbidden":
        names = recipe_keys() + list(RunConfig.model_fields)
        by_leaf = {name.split(".")[-1]: name for name in reversed(names)}
        nearest = [by_leaf[leaf] for leaf in difflib.get_close_matches(place[-1], by_leaf, 1, 0.6)]
        nearest = difflib.get_close_matches(key, names, 1, 0.6) or nearest
        return f"unknown key {key}" + (f"; did you mean {nearest[0]}?" if nearest else "")
    if kind == "missing":
        return f"{key} is missing"
    if (refused := TEXTS["refused"].get(key)) and str(problem["input"]).lower() in refused["values"]:
        return f"{key}: {problem['input']} is refused: {refused['reason']}"
    message = problem["msg"].removeprefix("Value error, ")
    message = ("" if key == "recipe" else f"{key}: ") + message[0].lower() + message[1:]
    return message if kind == "value_error" or key == "recipe" else f"{message}; it is {reprlib.repr(problem['input'])}"
