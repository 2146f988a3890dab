"""Documents from parquet files and Hugging Face datasets. Needs the extra `data` (datasets, and pyarrow that comes with it)."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dist_train.config.compose import ConfigError
from dist_train.config.schema import DataConfig
from dist_train.data.sources import PART_BYTES, Part, Span, field_text, files_fingerprint, matching_files


def _needs(module: str, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ConfigError(f"data.source={source}: needs the package {package}; pip install 'dist_train[data]'") from error


class ParquetSource:
    """One document per row of parquet files, its text in the column data.text_field; a part is a few row groups."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._parquet = _needs("pyarrow.parquet", "parquet")

    def parts(self, part_bytes: int = PART_BYTES) -> list[Part]:
        parts = []
        for file in matching_files(self._config.path):
            with self._open(str(file)) as table:
                if self._config.text_field not in table.schema_arrow.names:
                    names = ", ".join(table.schema_arrow.names)
                    raise ConfigError(f"{file}: no column {self._config.text_field!r} (columns: {names}); set data.text_field.")
                for group in range(table.num_row_groups):
                    size = table.metadata.row_group(group).total_byte_size
                    parts.append(Part((Span(str(file), group, group + 1),), size))
        if not parts:
            raise ConfigError(f"{self._config.path}: empty; give parquet files with rows.")
        return parts

    def fingerprint(self) -> str:
        return files_fingerprint(matching_files(self._config.path))

    def _open(self, path: str) -> Any:
        try:
            return self._parquet.ParquetFile(path)
        except Exception as error:  # pyarrow has no common base of its errors
            raise ConfigError(f"{path}: not readable as parquet ({error}); give whole parquet files.") from error

    def read(self, part: Part) -> Iterator[str]:
        field = self._config.text_field
        for span in part.spans:
            with self._open(span.path) as table:
                before = sum(table.metadata.row_group(g).num_rows for g in range(span.start))
                try:
                    column = table.read_row_groups(list(range(span.start, span.stop)), columns=[field]).column(field)
                except Exception as error:
                    raise ConfigError(f"{span.path}: row group {span.start}: damaged ({error}); get the file again.") from error
            for number, value in enumerate(column):
                yield _row_text({field: value.as_py()}, field, f"{span.path}:row {before + number + 1}")


class HuggingFaceSource:
    """One document per row of a dataset of the Hugging Face hub (`name` or `name:config`) or of a local folder."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._datasets = _needs("datasets", "huggingface")
        self._loaded: Any = None

    def _dataset(self) -> Any:
        if self._loaded is None:
            if not self._config.path:
                raise ConfigError("data.path is empty; give data.path=NAME of a Hugging Face dataset, NAME:CONFIG or a folder.")
            local = Path(self._config.path).expanduser()
            name, _, variant = (str(local), "", "") if local.exists() else self._config.path.partition(":")
            try:
                if (local / "dataset_info.json").is_file() or (local / "dataset_dict.json").is_file():
                    loaded = self._datasets.load_from_disk(name)
                    loaded = loaded[self._config.split] if isinstance(loaded, dict) else loaded
                else:
                    loaded = self._datasets.load_dataset(name, variant or None, split=self._config.split)
            except Exception as error:  # datasets raises errors of many kinds for bad names, splits, networks and files
                where = f"{self._config.path}: split {self._config.split!r}"
                raise ConfigError(
                    f"{where} cannot be loaded ({_first_line(error)}). Give a dataset and split that exist."
                ) from error
            if self._config.text_field not in loaded.column_names:
                names = ", ".join(loaded.column_names)
                where = f"{self._config.path}: no column {self._config.text_field!r}"
                raise ConfigError(f"{where} (columns: {names}); set data.text_field.")
            if not len(loaded):
                raise ConfigError(f"{self._config.path}: split {self._config.split!r} is empty; give another data.split.")
            self._loaded = loaded.select_columns([self._config.text_field])
        return self._loaded

    def parts(self, part_bytes: int = PART_BYTES) -> list[Part]:
        dataset = self._dataset()
        size = max(int(dataset.data.nbytes), 1)
        rows = max(len(dataset) * max(part_bytes, size // 4096) // size, 1)
        per_row = size / len(dataset)
        spans = [Span("", at, min(at + rows, len(dataset))) for at in range(0, len(dataset), rows)]
        return [Part((span,), int((span.stop - span.start) * per_row)) for span in spans]

    def fingerprint(self) -> str:
        local = Path(self._config.path).expanduser()
        if self._config.path and local.exists():
            return files_fingerprint(matching_files(str(local)))
        dataset = self._dataset()
        facts = (self._config.path, self._config.split, len(dataset), int(dataset.data.nbytes), dataset[0], dataset[-1])
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    def read(self, part: Part) -> Iterator[str]:
        field = self._config.text_field
        for span in part.spans:
            for number, text in enumerate(self._dataset()[span.start : span.stop][field]):
                yield _row_text({field: text}, field, f"{self._config.path}:row {span.start + number + 1}")


def _row_text(row: dict[str, Any], field: str, where: str) -> str:
    try:
        return field_text(row, field)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; every row must have a text.") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
