"""The layers of the package: a module imports only from lower ones, in no cycle, and the command line stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dist_train"
LAYERS = [
    {"config"},
    {"mesh"},
    {"ops", "params"},
    {"comm"},
    {"model"},
    {"tensor", "context", "pipeline", "remat"},
    {"zero"},
    {"optim", "data"},
    {"checkpoint", "observe", "plan"},
    {"train"},
    {"launcher"},
    {"cli"},
]
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE_LINES = 400
COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_gather_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "scatter", "scatter_object_list", "reduce", "barrier"),
    *("monitored_barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module of the package that this file imports, and whether the import runs when the file is loaded."""
    names = {module_name(each) for each in FILES}
    tree = ast.parse(path.read_text())
    later = {id(node) for outer in ast.walk(tree) if _is_later(outer) for node in ast.walk(outer)}
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: imports are written out in full"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in found:
            while name.startswith("dist_train") and name not in names:
                name = name.rpartition(".")[0]
            if name.startswith("dist_train"):
                yield name, id(node) not in later


def _is_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
        return node.test.id == "TYPE_CHECKING"
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def layer(module: str) -> int:
    parts = module.split(".")
    return LAYER_OF[parts[1]] if len(parts) > 1 else len(LAYERS)  # the package itself offers names of all its layers


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {path.relative_to(PACKAGE).parts[0] for path in FILES if path.parent != PACKAGE}
    assert parts <= LAYER_OF.keys()
    assert len(parts) > 5


def test_modules_import_only_from_lower_layers() -> None:
    wrong = []
    for path in FILES:
        here = module_name(path)
        for there, _ in imported(path):
            same_part = here.split(".")[1:2] == there.split(".")[1:2]
            if here != "dist_train" and there != "dist_train" and not same_part and layer(there) >= layer(here):
                wrong.append(f"{here} (layer {layer(here)}) imports {there} (layer {layer(there)})")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module_name(path): {there for there, now in imported(path) if now} - {module_name(path)} for path in FILES}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" imports ".join(error.args[1])) from None
    assert set(order) == graph.keys()


def test_only_one_file_names_the_collectives_of_torch() -> None:
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
                if ast.unparse(node.value) in ("dist", "torch.distributed", "distributed", "c10d"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                wrong += [f"{path.relative_to(ROOT)}:{node.lineno}" for alias in node.names if alias.name in COLLECTIVES]
    assert {place.partition(":")[0] for place in wrong} == {"dist_train/comm/collectives.py"}


def test_files_stay_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: length for name, length in lengths.items() if length > LONGEST_FILE_LINES}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["no-such-command"]])
def test_the_command_line_answers_without_loading_torch_or_hydra(arguments: list[str]) -> None:
    program = (
        f"import sys; from dist_train.cli.main import main; code = main({arguments!r}); "
        "print(sorted({'torch', 'hydra', 'omegaconf', 'numpy'} & sys.modules.keys())); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.returncode == (2 if arguments == ["no-such-command"] else 0)
