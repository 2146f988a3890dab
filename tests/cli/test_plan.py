"""`dist-train plan` tells of a configuration's pipeline what the simulator finds, and draws it."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from dist_train.cli import plan
from dist_train.cli.main import main
from dist_train.config.compose import compose
from dist_train.model.flops import head_in_blocks
from dist_train.pipeline import Schedule, ideal_bubble, simulate


def rows(out: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]


GIVEN = ["data=synthetic", "model.layers=8", "mesh.pp=4", "mesh.dp=2", "launch.device=cpu", "train.global_batch=32"]


def test_the_table_has_the_configured_schedule_first_and_others_beside_it(capsys):
    assert main(["plan", *GIVEN, "pipeline=zero_bubble"]) == 0
    found = rows(capsys.readouterr().out)
    assert found[0][:4] == ["zero_bubble", "4", "1", "8"]
    assert {row[0]: row[2] for row in found[1:]} == {"gpipe": "1", "1f1b": "1", "interleaved": "2", "zero_bubble_v": "2"}
    for name, ranks, chunks, microbatches, formula, _, held in found:
        schedule = Schedule(name, int(ranks), int(microbatches), int(chunks))
        peaks = [simulate(schedule).peak_in_flight(rank) / int(chunks) for rank in range(4)]
        assert formula == f"{ideal_bubble(schedule):.1%}"
        if name in ("gpipe", "1f1b"):
            assert [float(number) for number in held.split()] == peaks


def test_one_rank_has_one_row_whatever_schedule_is_set(capsys):
    assert main(["plan", "data=synthetic", "launch.device=cpu", "pipeline=zero_bubble_v"]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert row[1:3] == ["1", "1"] and row[4:6] == ["0.0%", "0.0%"]


def test_stages_cost_what_their_blocks_cost(capsys):
    config = compose(
        [
            *GIVEN,
            "mesh.stage_layers=[1,2,2,3]",
            "model.vocab=2",
            "model.hidden=4",
            "model.heads=2",
            "model.kv_heads=2",
            "model.ffn=1000000",
        ]
    )
    (chosen, *_) = plan.schedules(config)
    costs = plan.stage_costs(config, chosen, 0.25)
    assert [cost.forward for cost in costs] == pytest.approx([0.5, 1.0, 1.0, 1.5], rel=1e-4)
    assert all(cost.backward == pytest.approx(2 * cost.forward) and cost.transfer == 0.25 for cost in costs)
    assert simulate(chosen, costs).bubble > ideal_bubble(chosen) + 0.1
    even = plan.stage_costs(compose(GIVEN), chosen, 0.0)  # eight blocks, and the head on the last stage
    head = head_in_blocks(compose(GIVEN).model)
    assert [each.forward * (8 + head) / 4 for each in even] == pytest.approx([2, 2, 3, 1 + head])


def test_the_timeline_is_written(capsys, tmp_path):
    path = tmp_path / "made.svg"
    assert main(["plan", "--timeline", str(path), *GIVEN, "pipeline=interleaved", "mesh.chunks=2", "--transfer=0.1"]) == 0
    shown = capsys.readouterr()
    simulated = rows(shown.out)[0][5]
    assert str(path) in shown.err
    text = path.read_text()
    assert f"interleaved: 4 ranks, 2 chunks each, 8 micro-batches; bubble {simulated}" in text
    assert (
        "gradient sent" in text and len(list(ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}g"))) == 4 * 2 * 8 * 2
    )


def test_one_rank_has_no_bubble_and_no_choice(capsys):
    assert main(["plan", "data=synthetic", "launch.device=cpu"]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert row == ["1f1b", "1", "1", "4", "0.0%", "0.0%", "1"]


def test_many_ranks_fit_in_a_row():
    held = plan._held(simulate(Schedule("1f1b", 16, 32)))
    assert held == "16 15 14 13 12 11 … 1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mesh.pp=9"], "mesh.pp=9: times mesh.chunks=1 it makes 9 stages of model.layers=6; set mesh.pp=6"),
        (["mesh.pp=2", "pipeline=zero_bubble_v"], "mesh.chunks=1: pipeline=zero_bubble_v has exactly 2"),
        (["mesh.pp=2", "--transfer", "-1"], "--transfer -1: takes 0 or more"),
        (["--timeline", "/nonexistent/made.svg"], "--timeline /nonexistent/made.svg: No such file or directory; give"),
        (["--timelime", "made.svg"], "See: dist-train plan --help"),
    ],
)
def test_errors_say_value_rule_and_remedy(capsys, arguments, words):
    assert main(["plan", "data=synthetic", "launch.device=cpu", *arguments]) == 2
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", "--help"])
    assert end.value.code == 0 and "--timeline" in capsys.readouterr().out
