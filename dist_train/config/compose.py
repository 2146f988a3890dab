"""Hydra in and out of the dataclasses: register the schema, compose overrides, turn hydra's errors into ours."""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dist_train.config.schema import Config


class ConfigError(Exception):
    """A configuration or an input that a user can put right; the command line shows it without a traceback, exit code 2."""


def configs_dir() -> Path:
    """The folder of hydra groups: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def register() -> None:
    """Put the schema into hydra's store. Call before `hydra.main` or `compose`; calling again changes nothing."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store("schema", _composable(OmegaConf.structured(Config)))


def _composable(node: DictConfig) -> DictConfig:
    # OmegaConf makes the node of a frozen dataclass read-only, which would refuse hydra's own merges;
    # the objects that `to_config` returns are frozen all the same.
    OmegaConf.set_readonly(node, None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _composable(child)
    return node


def compose(overrides: list[str]) -> Config:
    """The config of these hydra overrides, as `dist-train train` would see it. Raises ConfigError."""
    import hydra

    register()
    try:
        with hydra.initialize_config_dir(str(configs_dir()), version_base="1.3"):
            return to_config(hydra.compose("config", overrides))
    except ConfigError:
        raise
    except Exception as error:
        raise translate(error) from error


def to_config(node: DictConfig) -> Config:
    """The frozen dataclass of a composed node: resolved, and refused by name where it holds what the schema lacks."""
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    for group, values in plain.items():
        if isinstance(values, dict) and group in _fields(Config):
            known = _fields(_fields(Config)[group])
            for key in values:
                if key not in known:
                    raise _unknown(f"{group}.{key}")
        elif group not in _fields(Config):
            raise _unknown(str(group))
    result = OmegaConf.to_object(OmegaConf.merge(_composable(OmegaConf.structured(Config)), plain))
    assert isinstance(result, Config)
    return result


def load(path: Path) -> Config:
    """Read back a run's `config.yaml`. Raises ConfigError naming the file."""
    try:
        node = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(f"{path}: not readable as a run's config ({error}); give the config.yaml of a run folder.") from error
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{path}: holds no mapping; give the config.yaml of a run folder.")
    return to_config(node)


def dump(config: Config) -> str:
    """The resolved config as YAML, every key written out; `load` reads it back equal."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def keys() -> list[str]:
    """Every dotted key of the surface, sorted."""
    found = []
    for name, kind in _fields(Config).items():
        found += [f"{name}.{leaf}" for leaf in _fields(kind)] if dataclasses.is_dataclass(kind) else [name]
    return sorted(found)


def translate(error: BaseException) -> ConfigError:
    """Hydra's or OmegaConf's complaint as one sentence: value, rule, remedy."""
    texts, cause = [], error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__  # type: ignore[assignment]
    text = "\n".join(texts)
    if found := re.search(r"Could not (?:override|append to config|delete from config)[^'\"]*['\"]([\w./@]+)['\"]", text):
        return _unknown(found[1])
    if found := re.search(r"Error merging override (\S+?)=(.*)", text):
        reason = next((t.splitlines()[0] for t in texts[1:] if t), "a value of another type")
        remedy = "Give a value of the type shown by: dist-train train --cfg job"
        return ConfigError(f"{found[1]}={found[2]}: {reason.rstrip('.')}. {remedy}")
    if found := re.search(r"Error parsing override '([^']*)'", text):
        example = "dist-train train data=text data.path=book.txt train.steps=200"
        return ConfigError(f"{found[1]}: not understood; what is to change is given as KEY=VALUE, for example: {example}")
    if found := re.search(r"Could not find '(\w+)/([^']*)'", text):
        options = sorted(p.stem for p in (configs_dir() / found[1]).glob("*.yaml"))
        remedy = f"{_nearest(found[2], options)}{found[1]} is one of: {', '.join(options)}."
        return ConfigError(f"{found[1]}={found[2]}: no such option. {remedy}")
    if found := re.search(r"Could not override '?([\w.]+)", text):
        return _unknown(found[1])
    return ConfigError(text.strip().splitlines()[0] if text.strip() else repr(error))


def _fields(kind: Any) -> dict[str, Any]:
    import typing

    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _unknown(key: str) -> ConfigError:
    return ConfigError(f"{key}: no such key. {_nearest(key, keys())}All keys: dist-train train --cfg job")


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]}? " if close else ""
