import pytest

from halfword.errors import UsageError
from halfword.report.runs import Memory, labels, load_runs


def test_runs_of_one_name_are_told_apart_by_their_parents(write_run):
    paths = [write_run(name, [1.0]) for name in ("a/exact", "b/exact", "b/bf16")]
    assert [run.label for run in load_runs(paths)] == ["a/exact", "b/exact", "bf16"]


def test_the_same_folder_twice_is_numbered(write_run):
    path = write_run("exact", [1.0])
    assert [run.label for run in load_runs([path, path])] == ["exact", "exact (2)"]


def test_a_file_is_labelled_without_its_suffix(write_csv):
    assert labels([write_csv("baseline.csv", [1.0]), write_csv("bf16.csv", [1.0])]) == [
        "baseline",
        "bf16",
    ]


def test_the_current_folder_has_its_own_name(write_run, monkeypatch):
    path = write_run("exact", [1.0])
    monkeypatch.chdir(path)
    assert load_runs([path.relative_to(path), write_run("bf16", [1.0])])[0].label == "exact"


def test_a_run_without_summary_or_memory_is_its_metrics(write_run):
    path = write_run("exact", [1.0], summary=False)
    (path / "memory.json").unlink()
    run, _ = load_runs([path, path])
    assert (run.status, run.evaluation, run.memory) == ("unfinished", None, None)
    assert run.digest("weights") is None


def test_a_metrics_file_alone_is_compared_by_its_losses(write_run):
    path = write_run("exact", [1.0])
    _, run = load_runs([path, path / "metrics.csv"])
    assert (run.label, run.status, run.summary) == ("metrics", "losses only", None)


@pytest.mark.parametrize("given", [[], ["runs/exact"]])
def test_fewer_than_two_runs_are_refused(given):
    with pytest.raises(UsageError) as error:
        load_runs(given)
    value = given[0] if given else "(none)"
    assert str(error.value) == f"RUN {value}: a comparison needs two runs or more; name another"


def test_a_missing_path_is_refused(write_run, tmp_path):
    missing = tmp_path / "nowhere"
    with pytest.raises(UsageError) as error:
        load_runs([write_run("exact", [1.0]), missing])
    fix = "does not exist; give a run folder or a step,loss CSV file"
    assert str(error.value) == f"RUN {missing}: {fix}"


def test_a_folder_that_is_not_a_run_is_refused(write_run, tmp_path):
    with pytest.raises(UsageError) as error:
        load_runs([write_run("exact", [1.0]), tmp_path])
    fix = "is not a run: it holds no metrics.csv; give a folder that halfword train wrote"
    assert str(error.value) == f"RUN {tmp_path}: {fix}"


def test_a_run_folder_with_a_plain_header_is_refused(write_run):
    path = write_run("exact", [1.0])
    (path / "metrics.csv").write_text("step,loss\n0,1.0\n")
    with pytest.raises(UsageError, match="has the header 'step,loss'; expected step,loss,lr,"):
        load_runs([path, path])


@pytest.mark.parametrize("name", ["summary.json", "memory.json"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"format": 1, "sta', "Invalid JSON"),
        ("[]", "Input should be an object"),
        ("{}", "Field required"),
        ("\udcff", "Invalid JSON"),
    ],
)
def test_a_damaged_record_is_refused(write_run, name, text, problem):
    path = write_run("exact", [1.0])
    (path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError) as error:
        load_runs([path, path])
    message = str(error.value)
    assert message.startswith(f"RUN {path / name}: is damaged (") and problem in message
    assert message.endswith("; restore it, or remove it to compare without it")
    assert "\n" not in message


def test_a_summary_of_a_later_format_is_refused(write_run):
    path = write_run("exact", [1.0], summary={"format": 2})
    with pytest.raises(UsageError, match=r"is damaged \(format: Input should be 1\)"):
        load_runs([path, path])


def test_moments_are_measured_and_then_planned():
    half, full = {"weights": {"bfloat16": 2}}, {"weights": {"bfloat16": 2}, "gradients": {"b": 2}}
    record = {"num_parameters": 1, "at_step_entry": full, "between_steps": half}
    planned = {"at_step_entry": full, "between_steps": half}
    moments = Memory(**record, planned=planned, peak={"transient": {"transient": 9}}).moments()
    assert list(moments) == [
        *("at step entry", "at step entry, planned"),
        *("between steps", "between steps, planned", "at the peak"),
    ]
    assert moments["at step entry, planned"] == {"weights": 2, "gradients": 2}
    assert moments["at the peak"] == {"transient": 9}
