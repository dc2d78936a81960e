"""Costs come back out of runs that were made with them; what cannot be fitted is refused; calibrations and plans survive their files."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from bench_planned import CPU, GPU, HEADER, chat, run_of
from hypothesis import given, settings
from hypothesis import strategies as st

import baton.bench.plan
from baton.bench.arrivals import ArrivalOptions
from baton.bench.errors import BenchFileError, CalibrationError, SettingError
from baton.bench.measures import Objectives
from baton.bench.plan import (
    Calibration,
    ClosedLoad,
    Costs,
    Demand,
    Effort,
    FleetShape,
    Lengths,
    Link,
    ServerLimits,
    Sizer,
    calibrate,
    drawn,
    from_runs,
    load_calibration,
    predict,
    predictions_markdown,
    replayed,
    save_calibration,
    sized_markdown,
)
from baton.bench.plan.live import stages as stages_of
from baton.bench.plan.nonnegative import fit
from baton.bench.plan.predict import Band, Prediction
from baton.bench.plan.sizing import Sized
from baton.bench.runfile import Run
from baton.bench.workload import WorkloadOptions, build_workload


def fixed(prompt: int, answer: int, num: int) -> tuple[tuple[int, int, bool], ...]:
    return ((prompt, answer, False),) * num


def stages() -> list[ClosedLoad]:
    """As `baton plan calibrate` asks."""
    alone = [ClosedLoad(fixed(prompt, 3, 6), 1) for prompt in (8, 40, 150, 500, 1500)]
    rows = [ClosedLoad(fixed(20, 24, 2 * clients), clients) for clients in (1, 2, 8)]
    draw = np.random.default_rng(0)
    mixed = tuple((200 if number % 3 == 0 else 20, int(draw.integers(17, 36)), number % 3 == 0) for number in range(40))
    return [*alone, *rows, ClosedLoad(fixed(300, 24, 8), 4), ClosedLoad(mixed, 3)]


def measured_runs() -> tuple[list[Run], list[Run]]:
    pair = FleetShape(num_prefill=1, num_decode=1, num_per_host=2)
    return [run_of(CPU, FleetShape(num_plain=1), load) for load in stages()], [run_of(CPU, pair, load) for load in stages()]


@pytest.fixture(scope="module")
def found() -> Calibration:
    plain, split = measured_runs()
    return calibrate(from_runs(plain, split, ServerLimits(), "simulated"))


def test_costs_come_back_out_of_samples(found: Calibration) -> None:
    ours, true = found.costs, CPU
    for name, within in (("prefill_token_s", 0.03), ("decode_step_s", 0.03), ("decode_row_s", 0.05), ("decode_context_s", 0.25)):
        assert getattr(ours.steps, name) == pytest.approx(getattr(true.steps, name), rel=within), name
    for tokens in (10, 100, 1000):
        assert ours.request_s + ours.steps.prefill_s(tokens, tokens**2) == pytest.approx(
            true.request_s + true.steps.prefill_s(tokens, tokens**2), rel=0.03
        )
    assert ours.steps.step_s(200, 200**2, 3, 500) == pytest.approx(true.steps.step_s(200, 200**2, 3, 500), rel=0.03)
    assert ours.path is not None
    assert true.path is not None
    for name in ("kv_bytes_per_token", "bandwidth", "tail_share", "handoff_s", "bootstrap_s"):
        assert getattr(ours.path, name) == pytest.approx(getattr(true.path, name), rel=0.02), name
    assert ours.path.request_s == pytest.approx(true.path.request_s, rel=0.15)
    assert ours.roles.prefill == pytest.approx(1.1, rel=0.02)
    assert ours.roles.decode == pytest.approx(1.05, rel=0.02)
    assert ours.neighbours.decode == pytest.approx(1.3, rel=0.05)
    assert ours.neighbours.prefill == pytest.approx(1.2, abs=0.15)
    assert all(residual.median < 0.03 for residual in found.residuals.values())
    assert found.notes == ()


@pytest.mark.parametrize(
    "shape", [FleetShape(num_plain=1), FleetShape(num_plain=2, num_per_host=2), FleetShape(num_prefill=1, num_decode=1, num_per_host=2)]
)
def test_a_calibrated_simulator_predicts_loads_that_it_was_not_fitted_to(found: Calibration, shape: FleetShape) -> None:
    lengths = Lengths(tuple((150 if number % 4 == 0 else 20, 20, number % 4 == 0) for number in range(40)))
    run = run_of(CPU, shape, drawn(lengths, ArrivalOptions(rate_rps=1.0), 120, seed=4))
    first = np.percentile([sample.token_s[0] - sample.sent_s for sample in run.samples], (50, 99))
    gaps = np.percentile(np.concatenate([np.diff(sample.token_s) for sample in run.samples]), (50, 99))
    figures = predict(found, shape, lambda seed: replayed(run.samples), 4, warm_up_share=0.0).figures
    for name, measured, within in (
        ("ttft_p50_ms", first[0], 0.15),
        ("ttft_p99_ms", first[1], 0.25),
        ("itl_p50_ms", gaps[0], 0.15),
        ("itl_p99_ms", gaps[1], 0.25),
    ):
        assert figures[name].middle == pytest.approx(1000 * measured, rel=within), name


@pytest.mark.parametrize("tells_start", [True, False])
def test_what_a_request_costs_beside_its_steps_is_not_mistaken_for_a_step(tells_start: bool) -> None:
    """Rows cost the same however many they are: the constants of request, step and rows make two sums then, and only the servers tell them apart."""
    true = dataclasses.replace(CPU, steps=dataclasses.replace(CPU.steps, decode_row_s=0.0, decode_context_s=0.0))
    loads = [load for load in stages() if load.rows != fixed(1500, 3, 6)]
    plain = [run_of(true, FleetShape(num_plain=1), load, tells_start=tells_start) for load in loads]
    ours = calibrate(from_runs(plain, (), ServerLimits(), "x")).costs
    assert ours.request_s == (pytest.approx(true.request_s, rel=0.01) if tells_start else 0.0)
    assert ours.request_s + ours.steps.prefill_step_s == pytest.approx(true.request_s + true.steps.prefill_step_s, rel=0.1)
    assert ours.steps.step_s(20, 20**2, 2, 60) == pytest.approx(true.steps.step_s(20, 20**2, 2, 60), rel=0.05)


def test_steps_of_some_numbers_of_rows_take_longer_than_the_formula_says() -> None:
    true = dataclasses.replace(CPU, steps=dataclasses.replace(CPU.steps, rows_factor=(1.0, 1.3, 1.0)))
    loads = [*stages(), ClosedLoad(fixed(20, 24, 8), 3)]
    found = calibrate(from_runs([run_of(true, FleetShape(num_plain=1), load) for load in loads], (), ServerLimits(), "x"))
    for rows in (1, 2, 3, 8):
        assert found.costs.steps.decode_s(rows, 30 * rows) == pytest.approx(true.steps.decode_s(rows, 30 * rows), rel=0.03), rows
    formula = dataclasses.replace(found.costs.steps, rows_factor=())
    assert found.costs.steps.decode_s(20, 600) == formula.decode_s(20, 600)  # so many were not seen
    body = found.costs.to_json()
    del body["steps"]["rows_factor"]  # as calibrations had none
    assert Costs.from_json(body).steps == formula


@settings(max_examples=30)
@given(st.lists(st.floats(0, 5), min_size=3, max_size=3), st.integers(0, 1000))
def test_nonnegative_coefficients_are_found_exactly(true: list[float], seed: int) -> None:
    columns = np.random.default_rng(seed).uniform(1, 10, (40, 3))
    measured = columns @ np.asarray(true) + 1e-3
    assert fit(columns, measured) @ columns.T == pytest.approx(measured, rel=0.02, abs=1e-2)
    assert (fit(columns, measured) >= 0).all()


def test_outliers_do_not_move_a_fit() -> None:
    draw = np.random.default_rng(1)
    columns = np.column_stack((np.ones(200), draw.uniform(1, 100, 200)))
    measured = columns @ np.asarray([5.0, 2.0])
    measured[:20] *= 30
    measured[20:40] *= 0.001  # two messages that were read at once: no step is so short
    assert fit(columns, measured) == pytest.approx([5.0, 2.0], rel=0.1)


def test_too_few_points_are_refused_and_say_what_to_measure() -> None:
    plain = [run_of(CPU, FleetShape(num_plain=1), load) for load in stages()[:2]]
    with pytest.raises(CalibrationError, match="12 prompts of 2 lengths had the plain server for themselves, but at least 8 of 3 lengths"):
        calibrate(from_runs(plain, (), ServerLimits(), "x"))
    with pytest.raises(CalibrationError, match="0 steps of decode rows alone"):
        calibrate(from_runs((), (), ServerLimits(), "x"))


def test_what_the_formulas_do_not_describe_is_refused() -> None:
    plain, _ = measured_runs()
    draw = np.random.default_rng(2)

    def shaken(run: Run) -> Run:
        samples = []
        for sample in run.samples:
            gaps = np.diff(sample.token_s) * np.exp(draw.normal(0, 1.5, len(sample.token_s) - 1))
            times = tuple((sample.token_s[0] + np.concatenate(([0.0], gaps.cumsum()))).tolist())
            samples.append(dataclasses.replace(sample, token_s=times, ended_s=times[-1]))
        return Run(HEADER, tuple(samples), ())

    with pytest.raises(CalibrationError, match=r"decode step: half of .* points are further than"):
        calibrate(from_runs([shaken(run) for run in plain], (), ServerLimits(), "x"))


@pytest.mark.parametrize("effort", [Effort(), Effort(64, 2, 4), Effort(4000, 64)])
def test_every_stage_of_a_live_calibration_has_a_folder_and_prompts_of_its_own(effort: Effort) -> None:
    found = list(stages_of(effort, 0))
    names = [name for name, _ in found]
    assert len(set(names)) == len(names)
    assert len({plan.workload.seed for _, plan in found}) == len(found)
    assert len({plan.workload.prompt_words for name, plan in found if name.startswith("prompt")}) >= 3


def test_failed_repeats_are_left_out() -> None:
    plain, _ = measured_runs()
    broken = [Run(run.header, (dataclasses.replace(run.samples[0], error="timeout"), *run.samples[1:]), ()) for run in plain]
    found = from_runs(broken, (), ServerLimits(), "x")
    assert (found.plain.decode, found.num_left_out) == ((), len(broken))


def test_a_calibration_survives_its_file(found: Calibration, tmp_path: Path) -> None:
    save_calibration(found, tmp_path / "c.json")
    assert load_calibration(tmp_path / "c.json") == found
    for text, named in (("x", "is not JSON"), ("{}", "not a calibration of version 1"), ('{"version": 1}', "other fields")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(BenchFileError, match=named):
            load_calibration(tmp_path / "bad.json")


def test_predictions_have_error_bars_and_a_slower_link_is_seen(found: Calibration) -> None:
    shape = FleetShape(num_prefill=1, num_decode=2)
    lengths = Lengths.of_workload(build_workload(WorkloadOptions("chat", answer_tokens=20, document_words=200)), found.tokens_per_word)

    def of(link: Link | None) -> float:
        prediction = predict(found, shape, lambda seed: drawn(lengths, ArrivalOptions(rate_rps=0.5), 150, seed), 4, Objectives(1000, 500), link)
        band = prediction.figures["itl_p99_ms"]
        assert band.low < band.middle < band.high
        assert "1P:2D" in predictions_markdown([prediction], found, "some load")
        return band.middle

    assert of(Link(bandwidth=2e6)) > 2 * of(None)


@pytest.mark.parametrize("is_split", [True, False])
def test_the_size_of_a_fleet_is_the_least_that_meets_the_objectives(is_split: bool) -> None:
    calibration = Calibration(GPU, (), {}, 1.0, 0.0, "known costs")
    lengths = Lengths(tuple((prompt, min(answer, 80), False) for prompt, answer in chat(500)))
    demand = Demand(lengths, ArrivalOptions(rate_rps=70), Objectives(250, 60), 0.95)
    sizer = Sizer(calibration, FleetShape(num_plain=1, limits=ServerLimits(mixed_prompt_tokens=512)), demand)
    sized = sizer.size(is_split=is_split, num_seeds=1, note=lambda text: None)
    shape = sized.confirmed.shape
    assert shape.num_servers > 1
    assert sized.confirmed.figures["goodput_share"].middle >= 0.95
    for kind in ("num_prefill", "num_decode") if is_split else ("num_plain",):
        if getattr(shape, kind) > 1:
            less = sizer.confirm(dataclasses.replace(shape, **{kind: getattr(shape, kind) - 1}), 1)
            assert less.figures["goodput_share"].middle < 0.95
    assert shape.name in sized_markdown([sized], ["plain: refused"], demand, calibration)


def test_objectives_that_no_number_of_servers_meets_are_refused() -> None:
    calibration = Calibration(GPU, (), {}, 1.0, 0.0, "known costs")

    def size(objectives: Objectives, prompt: int = 500) -> None:
        demand = Demand(Lengths(((prompt, 100, False),)), ArrivalOptions(rate_rps=5), objectives, 0.99)
        Sizer(calibration, FleetShape(num_plain=1), demand).size(is_split=False, num_seeds=1, note=lambda text: None)

    with pytest.raises(SettingError, match=r"itl_p99_ms is 1, but must be at least 5\.06, what a step of an idle server takes"):
        size(Objectives(400, 1))
    with pytest.raises(SettingError, match=r"ttft_ms is 10, but must be at least 19, what an idle server takes for 500 tokens"):
        size(Objectives(10, 50))
    with pytest.raises(SettingError, match=r"ITL p99 5\.5 ms, but with .* servers alone do not meet them"):
        size(Objectives(400, 5.5))


def test_the_face_of_the_package_is_sorted_and_there() -> None:
    assert baton.bench.plan.__all__ == sorted(baton.bench.plan.__all__)
    assert all(hasattr(baton.bench.plan, name) for name in baton.bench.plan.__all__)


def test_the_middle_fleet_is_told_in_numbers_that_add_up() -> None:
    """What it is between is of each kind by itself: the middles of the kinds need be no fleet's."""
    demand = Demand(Lengths(fixed(20, 24, 2)), ArrivalOptions(rate_rps=10_000), Objectives(250, 60))
    calibration = Calibration(GPU, (), {}, 1.0, 0.0, "known costs")
    middle = FleetShape(num_prefill=118, num_decode=826)
    sized = Sized("split", Band(0, 0, 0), Band(118, 158, 170), Band(790, 826, 826), Prediction(middle, 1, 1, {}))
    text = sized_markdown([sized], [], demand, calibration)
    assert "118 (118 to 170) prefill and 826 (790 to 826) decode servers, 944 in all" in text
